"""What a machine or a round does with messages of other ballots, sides and branches."""

import pytest
from msgspec import structs

from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.certificate import verify_checks
from spes_p2p.protocol.codec import bitmap, body_hash, cut_hash, decode, encode, receipt_hash, sign, statement_hash
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.history import History
from spes_p2p.protocol.messages import (
    Decided,
    Message,
    Proposal,
    ProposalMessage,
    Receipt,
    Ref,
    Seen,
    Side,
    Signed,
    TipAsk,
)
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.questions import Waypoint
from spes_p2p.protocol.receipts import mark_of
from spes_p2p.protocol.recovery import recover, sign_recovery
from spes_p2p.protocol.reopening import inherit, resume, stash_of
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.skip import head_at, judge
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    ack_of,
    alive_of,
    body_of,
    certificate_of,
    certificate_on,
    claim_of,
    cut_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    receipt_of,
    trained_items,
    transition_of,
    update_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
IDS = tuple(peer.peer_id for peer in PEERS)
HEAD = owned_head(PEERS)
ME, OTHER = PEERS[0], PEERS[1]
SIDE = IDS[:2]


def machine_of(me: Identity = ME, head: Head = HEAD) -> RoundMachine:
    machine = RoundMachine(head, me, verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
    machine.start(0)
    return machine


def hears(machine: RoundMachine, message: Message, sender: Identity = OTHER, now_ms: int = 1) -> list[Message]:
    effects = machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms)
    return [decode(effect.data) for effect in effects if isinstance(effect, fx.Send)]


def side_of(author: Identity, head: Head = HEAD, **changes: object) -> Signed:
    """Says that its author hears everybody and takes part in the final voting."""
    body = Side(head.run.run_id, head.epoch, head.round + 1, head.height, head.hash, b"\x0f", b"", True)
    return sign(author, structs.replace(body, **changes))


def answers(found: list[Message]) -> list[Side]:
    """The sides that were sent."""
    bodies = [message.body for message in found if isinstance(message, Signed)]
    return [body for body in bodies if isinstance(body, Side)]


def round_of(terms: Terms, me: Identity = ME, before: OpenRound | None = None) -> OpenRound:
    context = Context(
        terms=terms,
        signer=me,
        verifier=verify,
        outbox=Outbox(1_000),
        private_seed=b"mine",
        now_ms=0,
        opened_at_ms=0,
        journal=dict(before.context.journal) if before else {},
    )
    opened = OpenRound(context, History())
    opened.restore()
    return opened


# --- sides -----------------------------------------------------------------------------------------------------------


def test_a_voter_that_asks_is_answered_with_whom_this_one_hears_once_per_half_resend() -> None:
    machine = machine_of()
    (answer,) = answers(hears(machine, side_of(OTHER)))
    assert (answer.heard, answer.side, answer.asks, answer.tip) == (b"\x0f", b"", False, HEAD.hash)
    assert answers(hears(machine, side_of(OTHER), now_ms=400)) == []
    assert len(answers(hears(machine, side_of(OTHER), now_ms=501))) == 1
    assert answers(hears(machine, side_of(OTHER, asks=False), now_ms=2_000)) == []


def test_a_side_of_another_height_is_no_declaration_but_is_answered_and_its_author_asked() -> None:
    machine = machine_of()
    found = hears(machine, side_of(OTHER, height=7, heard=b"\xff", tip=bytes(32)))
    assert len(answers(found)) == 1
    assert any(isinstance(m, TipAsk) for m in found)
    assert machine._siding.ears.declared == {}


def test_a_side_is_taken_from_its_author_and_of_this_run_only() -> None:
    machine, stranger = machine_of(), identity_of("stranger")
    with pytest.raises(RemoteProtocolError, match="another run or peer"):
        hears(machine, side_of(PEERS[2]))
    with pytest.raises(RemoteProtocolError, match="another run or peer"):
        hears(machine, side_of(OTHER, run=bytes(32)))
    assert answers(hears(machine, side_of(stranger), stranger)) == []
    with pytest.raises(RemoteProtocolError, match="bitmap"):
        hears(machine, side_of(OTHER, heard=b"\xff"))


def test_a_member_without_a_vote_follows_only_a_side_that_may_make_certificates() -> None:
    two, guest = PEERS[:2], identity_of("guest")
    head = owned_head(two)
    items = [*(item_of(alive_of(head, peer)) for peer in two), item_of(join_of(head, guest))]
    head = next_head(head, body_of(head, transition_of(head, items)))
    machine = machine_of(guest, head)
    with pytest.raises(RemoteProtocolError, match="may make no certificate"):
        hears(machine, side_of(OTHER, head, heard=b"\x03", side=b"\x03"))
    hears(machine, side_of(OTHER, head, heard=b"\x02", side=b"\x02"))
    assert machine.terms.side == (OTHER.peer_id,)
    hears(machine, side_of(ME, head, heard=b"\x01", side=b"\x01"), ME, 2)
    assert machine.terms.side == (OTHER.peer_id,)  # it keeps to the side that it is in
    hears(machine, side_of(OTHER, head, heard=b"\x03", tip=bytes(32), asks=False), OTHER, 3)
    assert machine.terms.side == (OTHER.peer_id,)  # nor does a voter on another tip count
    hears(machine, side_of(OTHER, head, heard=b"\x03", asks=False), OTHER, 4)
    assert machine.terms.side == ()


# --- other ballots ---------------------------------------------------------------------------------------------------


def test_messages_of_another_ballot_are_kept_of_members_and_questions_are_not() -> None:
    machine, attempt = machine_of(), Terms(HEAD, SIDE)
    vote = vote_of(attempt, OTHER, Step.PREVOTE, NO_DIGEST)
    hears(machine, vote)
    hears(machine, Seen(0, 2, (), (), attempt.branch))
    hears(machine, vote, identity_of("stranger"))
    assert machine._parked.take(attempt.branch) == [(OTHER.peer_id, encode(vote))]


def test_who_is_in_a_later_epoch_is_asked_and_who_is_in_a_past_one_is_told() -> None:
    machine = machine_of()
    later = alive_of(HEAD, OTHER)
    ahead = sign(OTHER, structs.replace(later.body, epoch=1))
    assert any(isinstance(m, TipAsk) for m in hears(machine, ahead, now_ms=0))
    new = recover(Terms(HEAD), frozenset(IDS))
    key = next(peer for peer in PEERS if peer.peer_id == HEAD.run.manifest.recovery_key)
    hears(machine, sign_recovery(new, key), now_ms=2)
    assert machine.head.epoch == 1
    assert Decided(1, 2, machine.head.hash) in hears(machine, later, now_ms=3)


def test_an_old_certificate_changes_nothing() -> None:
    first = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    body = body_of(HEAD, transition_of(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS]))
    machine = machine_of(head=follow(first, [item_of(alive_of(first, OTHER))]))
    hears(machine, certificate_of(HEAD, body, PEERS))
    assert (machine.head.round, machine._height.shown) == (3, {})


def test_a_vote_of_another_ballot_does_not_reach_the_voting() -> None:
    voter = OneVoter(HEAD, PEERS)
    vote = vote_of(Terms(HEAD, SIDE), voter.others[0], Step.PREVOTE, NO_DIGEST)
    with pytest.raises(RemoteProtocolError, match="another ballot"):
        voter.hear(voter.others[0], vote)


def test_a_tentative_cut_leaves_out_what_would_change_the_roster_and_nobody_misses_it() -> None:
    opened = round_of(Terms(HEAD, SIDE))
    join = join_of(HEAD, identity_of("newcomer"))
    for signed in (alive_of(HEAD, OTHER), claim_of(HEAD, OTHER), join):
        opened.updates.add(signed)
    assert [item.kind for item in opened.cuts.make().items] == [ItemKind.ALIVE, ItemKind.CLAIM]
    assert opened.cuts.missing((), 0) == ["alive", "claim"]
    assert "join" in round_of_all().cuts.missing((), 0)


def round_of_all() -> OpenRound:
    opened = round_of(Terms(HEAD))
    opened.updates.add(join_of(HEAD, identity_of("newcomer")))
    return opened


def after(head: Head, *side: int) -> tuple[Head, Body]:
    """The next head and its body: a round without items, by a side or by all."""
    terms = Terms(head, tuple(IDS[place] for place in side))
    cut, items = cut_of(head, [])
    body = make_body(terms, advance(terms, cut_hash(cut), items, verify), (None,) * 4, b"")
    return next_head(head, body), body


def test_a_final_certificate_that_was_kept_is_followed_once_its_tip_is_known() -> None:
    tip, first = after(HEAD, 0, 1)
    _, second = after(tip)
    machine = machine_of()
    final = certificate_on(Terms(tip), second, PEERS)
    hears(machine, final)
    assert machine.head == HEAD
    hears(machine, certificate_on(Terms(HEAD, SIDE), first, PEERS[:2]), now_ms=2)
    assert (machine.head.round, machine.head.is_final) == (3, True)


def test_a_body_that_was_decided_on_an_unknown_tip_waits_for_that() -> None:
    tip, first = after(HEAD, 0, 1)
    _, body = after(tip)
    terms, machine = Terms(tip), machine_of()
    leader = next(peer for peer in PEERS if peer.peer_id == terms.leader(0))
    proposal = Proposal(HEAD.run.run_id, 0, terms.ballot_round, 0, body_hash(body), None, b"")
    hears(machine, ProposalMessage(sign(leader, proposal), body, b""), leader)
    for peer in PEERS[1:]:
        hears(machine, vote_of(terms, peer, Step.PRECOMMIT, body_hash(body)), peer)
    assert machine.head == HEAD
    hears(machine, certificate_on(Terms(HEAD, SIDE), first, PEERS[:2]), now_ms=2)
    assert machine.head.hash == body_hash(body)


def test_a_waypoint_may_have_been_made_on_a_tentative_tip() -> None:
    trunk, before = after(HEAD)
    tip, _ = after(trunk, 0, 1)
    head, body = after(tip)
    certificate = certificate_on(Terms(tip), body, PEERS[:3])
    waypoint = Waypoint(certificate=certificate, before=before, roster=trunk.state.roster)
    judged = judge(HEAD.run.run_id, 0, waypoint)
    verify_checks(judged.checks, verify)
    assert (judged.after.round, judged.after.hash, len(judged.signers)) == (4, head.hash, 3)
    found = head_at(HEAD.run, waypoint, head.state)
    assert (found.hash, found.recent) == (head.hash, head.recent[1:])


# --- what the next ballot inherits -----------------------------------------------------------------------------------


def test_the_next_ballot_knows_the_statements_cuts_and_receipts_of_the_one_before() -> None:
    before = round_of(Terms(HEAD))
    update = update_of(HEAD, OTHER)
    receipt = receipt_of(update, PEERS)
    before.updates.add(update)
    before.updates.add_receipt(receipt)
    other = Receipt(receipt.round, receipt.manifest, receipt.acks[:2])
    before.updates.receipts[receipt_hash(other)] = other
    cut, _ = cut_of(HEAD, [item_of(update, receipt)])
    before.cuts.learn(cut, ())
    before.context.state_ready = before.will_train = True
    after = round_of(Terms(HEAD, SIDE), before=before)
    resume(after, before)
    inherit(after, stash_of(before))
    assert (after.context.state_ready, after.will_train) == (True, True)
    assert statement_hash(update) in after.updates.by_hash
    assert cut_hash(cut) in after.cuts.known
    assert receipt_hash(receipt) in after.updates.receipts
    again = stash_of(after)
    assert receipt_hash(other) in again.receipts  # kept for the next, whatever holds here


def test_a_statement_or_digest_that_does_not_hold_in_a_ballot_is_kept_for_the_next() -> None:
    before = round_of(Terms(HEAD))
    stash = stash_of(before)
    update, stranger = update_of(HEAD, OTHER), identity_of("stranger")
    foreign = alive_of(HEAD, stranger)
    before.updates.add(update)
    held = before.updates.by_hash[statement_hash(update)]
    held.signed = foreign
    stash.statements[statement_hash(foreign)] = held
    stash.digests[NO_DIGEST] = foreign
    after = round_of(Terms(HEAD, SIDE))
    inherit(after, stash)
    assert after.updates.by_hash == {}
    assert set(stash_of(after).statements) == {statement_hash(foreign)}


def test_a_receipt_that_holds_in_a_side_only_waits_for_that_ballot() -> None:
    final = round_of(Terms(HEAD))
    update = update_of(HEAD, OTHER)
    short = Receipt(2, statement_hash(update), (mark_of(ack_of(update, ME)),))
    final.updates.add(update)
    final.updates.add_receipt_or_keep(short, OTHER.peer_id)
    assert final.updates.by_hash[short.manifest].receipt is None
    assert final.updates.spare_receipts == {short.manifest: short}
    attempt = round_of(Terms(HEAD, SIDE))
    inherit(attempt, stash_of(final))
    assert attempt.updates.by_hash[short.manifest].receipt == short
    attempt.updates.add_other_receipt(receipt_of(update_of(HEAD, PEERS[2]), PEERS))  # of an update that is not here
    assert set(attempt.updates.receipts) == {receipt_hash(short)}


def test_a_receipt_with_false_or_no_acks_is_refused_all_the_same() -> None:
    opened = round_of(Terms(HEAD))
    update = update_of(HEAD, OTHER)
    opened.updates.add(update)
    opened.updates.spare_receipts.clear()
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        opened.updates.add_receipt_or_keep(Receipt(2, statement_hash(update), ()), OTHER.peer_id)
    claim = claim_of(HEAD, OTHER)
    opened.updates.add(claim)
    wanted = Receipt(2, statement_hash(claim), ())
    opened.updates.add_receipt_or_keep(wanted, OTHER.peer_id)  # a receipt of what is no update
    assert opened.updates.receipts == {}
    opened.updates.add_receipt(receipt_of(update, PEERS))
    ref = Ref(RefKind.RECEIPT, receipt_hash(Receipt(2, statement_hash(update), ())), statement_hash(update))
    opened.context.want(ref, [OTHER.peer_id])
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        opened.updates.add_receipt_or_keep(Receipt(2, statement_hash(update), ()), OTHER.peer_id)
    alone = owned_head(PEERS[:1])
    single = round_of(Terms(alone))
    mine = update_of(alone, PEERS[0])
    single.updates.add(mine)
    assert single.updates.by_hash[statement_hash(mine)].receipt is not None  # nobody else has to acknowledge it
    assert not any(isinstance(effect, fx.Send) for effect in single.context.effects)


def test_a_second_update_of_a_slot_that_is_served_is_not_looked_at() -> None:
    after = follow(HEAD, trained_items(HEAD, PEERS))
    opened = round_of(Terms(after))
    opened.updates.add(update_of(HEAD, OTHER, note="another"))
    assert not any(isinstance(effect, fx.CheckPiece) for effect in opened.context.effects)
    assert bitmap({0}, 4) == b"\x01"
