"""One round's messages: what is taken from whom, what is answered, offered, and repeated."""

from __future__ import annotations

import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import body_hash, cut_hash, decode, receipt_hash, sign, statement_hash
from spes_p2p.protocol.messages import (
    Alive,
    BodyMessage,
    CutAnnouncement,
    CutMessage,
    Manifest,
    Message,
    Offer,
    PartDigest,
    ProposalMessage,
    Ref,
    Refusal,
    Signed,
    TipAsk,
    ViewChange,
    Want,
)
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, RefusalReason, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    ack_of,
    alive_of,
    body_of,
    cut_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    pieces_of,
    receipt_of,
    trained_items,
    transition_of,
    update_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
RUN = HEAD.run.run_id
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
BODY = body_of(HEAD, transition_of(HEAD, ALIVE))
CUT = cut_of(HEAD, ALIVE)[0]
UPDATE = update_of(HEAD, PEERS[0])
QUIET = follow(HEAD, ALIVE)
"""Round 2 is certified, without an update."""


def settled() -> OneVoter:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in ALIVE))
    return voter


def sent_to(voter: OneVoter, peer: bytes) -> list[Message]:
    return [message for to, message in voter.sent if to == peer]


def answers(voter: OneVoter, kind: RefKind, identity: Digest, about: Digest = NO_DIGEST) -> list[Message]:
    asker = voter.others[-1]
    voter.sent.clear()
    voter.hear(asker, Want(0, 2, (Ref(kind, identity, about),)))
    return sent_to(voter, asker.peer_id)


# --- what is taken ---------------------------------------------------------------------------------------------------


def test_unsigned_messages_count_only_from_members() -> None:
    voter, x = settled(), identity_of("x")
    voter.context.want(Ref(RefKind.BODY, body_hash(BODY), NO_DIGEST), [voter.leaders[0].peer_id])
    voter.hear(x, BodyMessage(BODY, b""))
    update = update_of(HEAD, voter.others[0])
    voter.hear_all(update)
    voter.hear(x, receipt_of(update, PEERS), Want(0, 2, (Ref(RefKind.STATEMENT, statement_hash(update), NO_DIGEST),)))
    assert voter.round.updates.receipts == {}
    assert sent_to(voter, x.peer_id) == []
    assert voter.round.bodies.known == {}


def test_signed_messages_count_whoever_brings_them() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.hear(identity_of("x"), alive_of(HEAD, voter.others[0]))
    assert (ItemKind.ALIVE, voter.others[0].peer_id, 0) in voter.round.updates.slots


def test_a_body_is_taken_only_if_it_was_asked_for() -> None:
    voter = settled()
    sender = voter.others[0]
    voter.hear(sender, BodyMessage(BODY, b""))
    assert voter.round.bodies.known == {}
    voter.context.want(Ref(RefKind.BODY, body_hash(BODY), NO_DIGEST), [sender.peer_id])
    voter.hear(sender, BodyMessage(BODY, b""))
    assert list(voter.round.bodies.known) == [body_hash(BODY)]
    assert voter.round.bodies.known[body_hash(BODY)].sources == [sender.peer_id]


def test_a_body_is_asked_for_once_f_plus_one_have_voted_for_it() -> None:
    voter = settled()
    first, second = voter.others[:2]
    wanted = Ref(RefKind.BODY, body_hash(BODY), NO_DIGEST)
    voter.hear(first, vote_of(voter.terms, first, Step.PRECOMMIT, body_hash(BODY)))
    assert not voter.context.is_wanted(wanted)
    voter.hear(second, vote_of(voter.terms, second, Step.PRECOMMIT, body_hash(BODY)))
    assert voter.context.is_wanted(wanted)
    assert sent_to(voter, min(first.peer_id, second.peer_id))[-1] == Want(0, 2, (wanted,))


def test_a_wanted_object_is_asked_of_one_source_after_the_other() -> None:
    voter = OneVoter(HEAD, PEERS)
    ref = Ref(RefKind.CUT, digest("cut"), NO_DIGEST)
    sources = [peer.peer_id for peer in voter.others]
    voter.context.want(ref, [voter.me.peer_id, *sources])
    voter.wait(3 * QUICK.resend_ms)
    assert [to for to, m in voter.sent if m == Want(0, 2, (ref,))] == [*sources, sources[0]]
    voter.context.found(ref)
    voter.sent.clear()
    voter.wait(3 * QUICK.resend_ms)
    assert voter.sent == []


def test_bare_announcements_and_messages_of_other_kinds_are_no_part_of_a_round() -> None:
    voter = settled()
    leader = voter.leaders[0]
    with pytest.raises(RemoteProtocolError, match="a bare cut-by"):
        voter.hear(leader, sign(leader, CutAnnouncement(RUN, 0, 2, 0, cut_hash(CUT))))
    before = (len(voter.sent), len(voter.effects))
    voter.hear(leader, TipAsk(0, 2))
    voter.round.local(fx.Tick())
    voter.wait(1)
    assert (len(voter.sent), len(voter.effects)) == before
    assert voter.round.cuts.announced == {}


def test_a_statement_of_another_run_or_epoch_is_refused() -> None:
    voter = settled()
    peer = voter.others[0]
    for body in (Alive(digest("run"), 0, 2, True), Alive(RUN, 1, 2, True)):
        with pytest.raises(RemoteProtocolError, match="alive of another run or epoch"):
            voter.hear(peer, sign(peer, body))


def test_a_refusal_of_anything_but_an_own_update_is_not_shown() -> None:
    voter = settled()
    other = voter.others[0]
    own = alive_of(HEAD, voter.me)
    for refused in (own, alive_of(HEAD, other), UPDATE):
        body = Refusal(RUN, 0, 2, statement_hash(refused), 0, RefusalReason.SCHEMA)
        voter.hear(other, sign(other, body))
    assert not any(isinstance(effect, fx.Notify) for effect in voter.effects)


# --- late messages ---------------------------------------------------------------------------------------------------


def late(voter: OneVoter, sender: bytes, message: Message) -> None:
    voter.round.late(sender, message)
    voter.wait(1)


def test_late_statements_of_members_count_and_late_votes_and_signs_of_life_do_not() -> None:
    voter = OneVoter(QUIET, PEERS)
    a, b = voter.others[:2]
    late(voter, b.peer_id, update_of(HEAD, a))
    late(voter, b.peer_id, alive_of(HEAD, b))
    late(voter, b.peer_id, vote_of(OneVoter(HEAD, PEERS).terms, b, Step.PREVOTE, digest("body")))
    assert list(voter.round.updates.slots) == [(ItemKind.UPDATE, a.peer_id, 2)]
    assert voter.round.voting.votes[Step.PREVOTE] == {}


def test_late_joins_count_and_late_statements_of_those_who_left_do_not() -> None:
    voter, x = OneVoter(QUIET, PEERS), identity_of("x")
    late(voter, x.peer_id, join_of(HEAD, x))
    late(voter, x.peer_id, update_of(HEAD, identity_of("gone"), shards=()))
    late(voter, x.peer_id, receipt_of(UPDATE, PEERS))
    late(voter, PEERS[1].peer_id, CutMessage(sign(PEERS[1], CutAnnouncement(RUN, 0, 2, 0, cut_hash(CUT))), CUT))
    assert list(voter.round.updates.slots) == [(ItemKind.JOIN, x.peer_id, 0)]
    assert voter.round.joiners() == (x.peer_id,)
    assert voter.round.cuts.known == {}


def test_a_late_receipt_counts_if_it_still_is_one() -> None:
    voter = OneVoter(QUIET, PEERS)
    author = voter.others[0]
    update = update_of(HEAD, author)
    late(voter, author.peer_id, update)
    few = receipt_of(update, [peer for peer in PEERS if peer != author][:1])
    late(voter, author.peer_id, few)
    assert voter.round.updates.receipts == {}
    late(voter, author.peer_id, receipt_of(update, PEERS))
    assert list(voter.round.updates.receipts) == [receipt_hash(receipt_of(update, PEERS))]


def test_a_result_of_a_round_that_is_over_without_pieces_says_nothing() -> None:
    voter = OneVoter(QUIET, PEERS)
    voter.round.training = True
    voter.round.local(fx.nothing_trained(2))
    voter.wait(1)
    assert voter.sent == []
    assert voter.round.training
    voter.round.local(fx.nothing_trained(3))
    voter.wait(1)
    said = [m.body.round for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Alive)]
    assert said == [3] * 3


def test_a_result_of_a_peer_that_is_no_member_or_of_a_round_to_come_is_dropped() -> None:
    x = identity_of("x")
    for voter, number in ((OneVoter(HEAD, PEERS, me=x), 2), (OneVoter(HEAD, PEERS), 3)):
        pieces = pieces_of(HEAD, voter.me.peer_id)
        voter.round.local(fx.Trained(round=number, tokens=1, steps=1, loss_micronats=1, pieces=pieces))
        voter.wait(1)
        assert not any(isinstance(m, Signed) and isinstance(m.body, Manifest) for _, m in voter.sent)


# --- what is answered ------------------------------------------------------------------------------------------------


def test_every_kind_of_object_is_sent_to_who_asks() -> None:
    voter, body, transition = with_updates()
    update = next(iter(voter.round.updates.slots.values())).signed
    receipt = receipt_of(update, PEERS)
    assert answers(voter, RefKind.STATEMENT, statement_hash(update)) == [update]
    assert answers(voter, RefKind.RECEIPT, receipt_hash(receipt), statement_hash(update)) == [receipt]
    (cut,) = answers(voter, RefKind.CUT, transition_cut(voter))
    assert isinstance(cut, CutMessage)
    assert cut_hash(cut.cut) == transition_cut(voter)
    assert answers(voter, RefKind.BODY, body_hash(body)) == [BodyMessage(body, b"")]
    digests = answers(voter, RefKind.DIGESTS, transition)
    assert {(m.body.part, m.body.digest) for m in digests if isinstance(m, Signed)} == set(enumerate(body.parts))
    assert len(digests) == 4 * voter.terms.replicas


@pytest.mark.parametrize("kind", list(RefKind))
def test_what_is_not_here_is_not_answered(kind: RefKind) -> None:
    assert answers(settled(), kind, digest("unknown")) == []


def with_updates() -> tuple[OneVoter, Body, Digest]:
    """A voter with everybody's receipted update, a cut, its digests and a proposal; hash of the updates."""
    items = trained_items(HEAD, PEERS)
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
    transition = voter.cut(items)
    body = body_of(HEAD, transition)
    voter.digests_come(transition, body, range(4))
    voter.propose(body)
    return voter, body, transition.updates_hash


def transition_cut(voter: OneVoter) -> Digest:
    (known,) = voter.round.cuts.known
    return known


def test_a_member_that_came_back_gets_all_of_the_round_as_far_as_its_role_goes() -> None:
    voter, _, _ = with_updates()
    voter.others_ask_for_view(1, 1)
    found = [decode(data) for data in voter.round.everything(voter.others[1].peer_id)]
    bodies = [type(m.body) for m in found if isinstance(m, Signed)]
    assert {kind: bodies.count(kind) for kind in set(bodies)} == {Manifest: 4, PartDigest: 8, ViewChange: 1}
    assert sum(not isinstance(m, Signed) for m in found) == 4 + 1 + 1  # receipts, a cut, a proposal
    assert [type(m) for m in found if isinstance(m, CutMessage | ProposalMessage)] == [CutMessage, ProposalMessage]
    assert voter.round.everything(identity_of("x").peer_id) == []


def test_a_member_without_a_vote_gets_statements_and_receipts_only() -> None:
    x = identity_of("x")
    head = follow(HEAD, [*ALIVE, item_of(join_of(HEAD, x))])
    items = trained_items(head, PEERS)
    voter = OneVoter(head, PEERS)
    voter.hear_all(*(item.signed for item in items))
    voter.cut([item_of(item.signed) for item in items])
    assert x.peer_id not in voter.terms.eligible
    found = [decode(data) for data in voter.round.everything(x.peer_id)]
    assert sorted(m.body.tag for m in found if isinstance(m, Signed)) == ["manifest"] * 4
    assert len(found) == 4


def test_a_cut_that_was_announced_and_is_not_here_is_not_passed_on() -> None:
    voter = settled()
    announcement = sign(voter.leaders[1], CutAnnouncement(RUN, 0, 2, 1, digest("a cut nobody sent")))
    voter.round.cuts.announced[1] = announcement
    found = [decode(data) for data in voter.round.everything(voter.others[0].peer_id)]
    assert not any(isinstance(m, CutMessage) for m in found)


# --- what is offered and passed on -----------------------------------------------------------------------------------


def offers(voter: OneVoter) -> dict[bytes, set[Ref]]:
    found: dict[bytes, set[Ref]] = {}
    for to, message in voter.sent:
        if isinstance(message, Offer):
            found.setdefault(to, set()).update(message.refs)
    return found


def test_voters_offer_the_leaders_of_this_view_and_the_next_what_those_did_not_write() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[2]
    update = update_of(HEAD, author)
    voter.hear_all(alive_of(HEAD, voter.leaders[0]), update)
    voter.hear(author, receipt := receipt_of(update, PEERS))
    voter.wait(2 * QUICK.resend_ms)
    first, second = (leader.peer_id for leader in voter.leaders[:2])
    about_update = {
        Ref(RefKind.STATEMENT, statement_hash(update), NO_DIGEST),
        Ref(RefKind.RECEIPT, receipt_hash(receipt), statement_hash(update)),
    }
    alive = Ref(RefKind.STATEMENT, statement_hash(alive_of(HEAD, voter.leaders[0])), NO_DIGEST)
    assert offers(voter) == {first: about_update, second: {*about_update, alive}}
    voter.sent.clear()
    voter.wait(2 * QUICK.resend_ms)
    assert offers(voter) == {}  # once


def test_a_member_without_a_vote_offers_nothing() -> None:
    x = identity_of("x")
    head = follow(HEAD, [*ALIVE, item_of(join_of(HEAD, x))])
    voter = OneVoter(head, PEERS, me=x)
    voter.hear_all(*(alive_of(head, peer) for peer in PEERS))
    voter.wait(3 * QUICK.resend_ms)
    assert offers(voter) == {}


def test_an_offer_is_followed_if_it_is_news() -> None:
    voter = settled()
    update = update_of(HEAD, voter.others[0])
    voter.hear_all(update)
    known = Ref(RefKind.STATEMENT, statement_hash(update), NO_DIGEST)
    receipt = Ref(RefKind.RECEIPT, digest("receipt"), statement_hash(update))
    unknown = Ref(RefKind.STATEMENT, digest("statement"), NO_DIGEST)
    body = Ref(RefKind.BODY, digest("body"), NO_DIGEST)
    voter.hear(voter.others[1], Offer(0, 2, (known, receipt, unknown, body)))
    assert {ref: voter.context.is_wanted(ref) for ref in (known, receipt, unknown, body)} == {
        known: False,
        receipt: True,
        unknown: True,
        body: False,
    }
    voter.hear(voter.others[1], receipt_of(update, PEERS))
    assert not voter.round.updates.lacks(receipt)


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_a_round_wakes_up_for_each_of_its_waits() -> None:
    voter = OneVoter(HEAD, PEERS)
    budget, timeout = voter.terms.transfer_budget_ms, QUICK.view_timeout(0)
    voter.context.now_ms = QUICK.resend_ms  # the next gossip is due now
    assert voter.round.deadline_ms() == QUICK.round_max_ms
    voter.hear_all(*(item.signed for item in ALIVE[:2]))
    voter.round.voting.begin(0)
    began = voter.context.now_ms
    assert voter.round.deadline_ms() == began + budget
    voter.propose(voter.quiet_body(ALIVE[:2]))
    due, seen = voter.round.deadline_ms(), []
    while due is not None and due <= began + 2 * budget + timeout:
        seen.append(due - began)
        voter.context.now_ms = due
        due = voter.round.deadline_ms()
    patience = timeout // 2
    expected = {patience, budget // 2, budget - patience, budget, budget + timeout}
    assert expected <= set(seen)
    assert QUICK.round_min - began in seen


def test_blobs_that_a_body_names_are_asked_for_again_after_a_resend() -> None:
    voter, body, _ = with_updates()
    (known,) = voter.round.bodies.known.values()
    assert (known.held, known.fetched_at_ms) == (False, 0)
    assert voter.round.deadline_ms() is not None
    voter.effects.clear()
    voter.wait(QUICK.resend_ms)
    again = {effect.blob for effect in voter.effects if isinstance(effect, fx.FetchBlob)}
    assert set(body.parts) <= again


def test_a_join_that_its_certificate_served_is_not_carried() -> None:
    x = identity_of("x")
    before = OneVoter(HEAD, PEERS)
    before.round.remote(x.peer_id, join_of(HEAD, x))
    held = before.round.updates.slots[ItemKind.JOIN, x.peer_id, 0]
    after = OneVoter(follow(HEAD, [*ALIVE, item_of(join_of(HEAD, x))]), PEERS)
    after.round.carry(held)
    assert after.round.updates.slots == {}
    still_out = OneVoter(QUIET, PEERS)
    still_out.round.carry(held)
    assert list(still_out.round.updates.slots) == [(ItemKind.JOIN, x.peer_id, 0)]


def test_an_ack_of_something_else_is_dropped() -> None:
    voter = settled()
    acker = voter.others[0]
    voter.hear_all(UPDATE)
    voter.hear(acker, ack_of(update_of(HEAD, voter.me, note="never sent"), acker), ack_of(UPDATE, acker))
    assert voter.round.updates.by_hash[statement_hash(UPDATE)].acks == {}
