import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.certificate import verify_certificate
from spes_p2p.protocol.codec import body_hash
from spes_p2p.protocol.messages import Evidence, ProposalMessage, Receipt, Ref, Signed, Want
from spes_p2p.protocol.params import MAX_VIEWS_AHEAD
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import Transition
from spes_p2p.protocol.wire import NO_DIGEST, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    claim_of,
    identities,
    item_of,
    owned_head,
    receipt_of,
    trained_items,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
PREVOTE, PRECOMMIT = Step.PREVOTE, Step.PRECOMMIT
PROTOCOL = HEAD.run.config.protocol


def settled(items: list[Item] = ALIVE, journal: dict[str, bytes] | None = None) -> OneVoter:
    """A voter in view 0 that holds `Alive{no more}` of all."""
    voter = OneVoter(HEAD, PEERS, journal)
    voter.hear_all(*(item.signed for item in items))
    assert voter.round.voting.view == 0
    return voter


def voted() -> tuple[OneVoter, Body, Digest]:
    """A voter that has prevoted the body of view 0."""
    voter = settled()
    body = voter.quiet_body(ALIVE)
    identity = voter.propose(body)
    return voter, body, identity


def locked() -> tuple[OneVoter, Body, Digest]:
    """A voter that has precommitted the body of view 0."""
    voter, body, identity = voted()
    voter.others_vote(PREVOTE, identity, held=(True, True))
    assert voter.votes(PRECOMMIT) == [(identity, False)]
    return voter, body, identity


def other_body(voter: OneVoter, view: int) -> Body:
    """A valid body of another cut: one more claim."""
    claim = claim_of(HEAD, voter.others[0])
    voter.hear(voter.others[0], claim)
    return voter.quiet_body([*ALIVE, item_of(claim)], view)


# --- prevote and precommit -------------------------------------------------------------------------------------------


def test_a_voter_prevotes_what_follows_from_certificate_and_cut() -> None:
    voter, _, identity = voted()
    assert voter.votes(PREVOTE) == [(identity, True)]
    assert voter.votes(PRECOMMIT) == []


@pytest.mark.parametrize(
    "change",
    [
        {"global_step": 1},
        {"seed": bytes(32)},
        {"tokens": 1},
        {"inner_steps": 11},
        {"version": 2},
        {"lease_delta": ()},
        {"final": False},
        {"roster_root": bytes(32)},
        {"data_cursor": 1},
    ],
)
def test_a_body_that_does_not_follow_gets_nil(change: dict[str, object]) -> None:
    voter = settled()
    body = voter.quiet_body(ALIVE[:3] if "lease_delta" in change else ALIVE)
    wrong = msgspec.structs.replace(body, **change)
    if wrong == body:
        wrong = msgspec.structs.replace(body, psi=bytes(32))
    voter.propose(wrong)
    assert voter.votes(PREVOTE) == [(NO_DIGEST, False)]


def test_precommit_needs_a_quorum_of_prevotes_of_which_f_plus_one_hold() -> None:
    voter, _, identity = voted()
    voter.others_vote(PREVOTE, identity, held=(False,))
    assert voter.votes(PRECOMMIT) == []
    voter.others_vote(PREVOTE, identity, held=(False, False, False))
    assert voter.votes(PRECOMMIT) == []  # all four prevoted, but this voter alone says held: f + 1 = 2
    other, _, identity = voted()
    other.others_vote(PREVOTE, identity, held=(False, True))
    assert other.votes(PRECOMMIT) == [(identity, False)]


def test_a_quorum_of_precommits_decides() -> None:
    voter, body, identity = locked()
    assert voter.round.voting.decided() is None
    voter.others_vote(PRECOMMIT, identity, held=(False, False))
    certificate = voter.round.voting.decided()
    assert certificate is not None
    assert verify_certificate(voter.terms, certificate, verify).round == 2
    assert certificate.body == body


def test_votes_of_different_views_do_not_add_up() -> None:
    voter, _, identity = locked()
    voter.hear(voter.others[0], vote_of(voter.terms, voter.others[0], PRECOMMIT, identity, view=0))
    voter.hear(voter.others[1], vote_of(voter.terms, voter.others[1], PRECOMMIT, identity, view=1))
    assert voter.round.voting.decided() is None


def test_a_voter_without_the_blobs_waits_for_f_plus_one_that_hold() -> None:
    items = trained_items(HEAD, PEERS)
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in items))
    voter.wait(PROTOCOL.round_min)
    for item in items:
        voter.round.updates.add_receipt(receipt_for(item))
    transition = voter.cut(items)
    body = body_of(HEAD, transition)
    voter.digests_come(transition, body, range(4))
    identity = voter.propose(body)
    voter.others_vote(PREVOTE, identity, held=(True, False, False))
    voter.wait(5_000)
    assert voter.votes(PREVOTE) == []
    late = OneVoter(HEAD, PEERS)
    late.hear_all(*(item.signed for item in items))
    late.wait(PROTOCOL.round_min)
    for item in items:
        late.round.updates.add_receipt(receipt_for(item))
    late.cut(items)
    late.digests_come(transition, body, range(4))
    late.propose(body)
    late.others_vote(PREVOTE, identity, held=(True, True, False))
    late.wait(PROTOCOL.view_timeout(0) // 2)
    assert late.votes(PREVOTE) == [(identity, False)]


def test_changed_parts_need_their_equal_digests() -> None:
    voter, body, transition = with_updates()
    voter.digests_come(transition, body, [0, 1, 2])
    identity = voter.propose(body)
    hold_all(voter, body)
    voter.wait(1_000)
    assert voter.votes(PREVOTE) == []
    voter.digests_come(transition, body, [3])
    voter.wait(1_000)
    assert voter.votes(PREVOTE) == [(identity, True)]


# --- locks -----------------------------------------------------------------------------------------------------------


def test_a_locked_voter_gives_nil_to_another_body() -> None:
    voter, _, _ = locked()
    voter.others_ask_for_view(1, 3)
    voter.propose(other_body(voter, 1), view=1)
    assert voter.votes(PREVOTE, 1) == [(NO_DIGEST, False)]


def test_a_locked_voter_prevotes_its_body_again() -> None:
    voter, body, identity = locked()
    voter.others_ask_for_view(1, 3)
    voter.propose(body, view=1, qc=voter.qc_of(identity, 0))
    assert voter.votes(PREVOTE, 1) == [(identity, True)]


def test_a_body_on_another_tip_is_not_judged_and_gets_no_vote_until_the_tip_is_known() -> None:
    voter = settled()
    body = msgspec.structs.replace(voter.quiet_body(ALIVE), via=digest("another tip"))
    voter.propose(body)
    assert voter.votes(PREVOTE) == []


def test_a_lock_yields_to_a_quorum_certificate_of_a_later_view() -> None:
    voter, _, _ = locked()
    voter.others_ask_for_view(1, 3)
    body = other_body(voter, 1)
    voter.others_ask_for_view(2, 3)
    identity = voter.propose(body, view=2, qc=voter.qc_of(body_hash(body), 1))
    assert voter.votes(PREVOTE, 2) == [(identity, True)]


def test_a_voter_that_is_locked_later_does_not_yield_to_an_older_quorum_certificate() -> None:
    voter = settled()
    first = voter.quiet_body(ALIVE)
    voter.others_ask_for_view(1, 3)
    second = other_body(voter, 1)
    identity = voter.propose(second, view=1)
    voter.others_vote(PREVOTE, identity, view=1)
    assert voter.votes(PRECOMMIT, 1) == [(identity, False)]
    voter.others_ask_for_view(2, 3)
    voter.propose(first, view=2, qc=voter.qc_of(body_hash(first), 0))
    assert voter.votes(PREVOTE, 2) == [(NO_DIGEST, False)]


def test_a_proposal_may_not_contradict_its_quorum_certificate() -> None:
    voter, body, identity = voted()
    voter.others_ask_for_view(1, 3)
    for qc in (voter.qc_of(digest("other"), 0), voter.qc_of(identity, 1)):
        with pytest.raises(RemoteProtocolError, match="contradicts"):
            voter.propose(body, view=1, qc=qc)
    forged = msgspec.structs.replace(voter.qc_of(identity, 0), signatures=(bytes(64),) * 3)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        voter.propose(body, view=1, qc=forged)
    assert voter.votes(PREVOTE, 1) == []


def test_a_precommit_that_says_held_is_refused_and_spoils_no_certificate() -> None:
    voter, _, identity = locked()
    liar, *honest = voter.others
    with pytest.raises(RemoteProtocolError, match="precommit that says held"):
        voter.hear(liar, vote_of(voter.terms, liar, PRECOMMIT, identity, held=True))
    for peer in honest:
        voter.hear(peer, vote_of(voter.terms, peer, PRECOMMIT, identity))
    certificate = voter.round.voting.decided()
    assert certificate is not None
    assert verify_certificate(voter.terms, certificate, verify).round == voter.terms.round


# --- local checks ----------------------------------------------------------------------------------------------------


def test_a_cut_that_leaves_out_what_was_held_in_time_gets_nil() -> None:
    voter = settled()
    voter.hear(voter.others[0], claim := claim_of(HEAD, voter.others[0]))
    voter.others_ask_for_view(1, 3)
    voter.wait(100)
    voter.others_ask_for_view(2, 3)  # the claim has been held for the whole of view 1
    voter.propose(voter.quiet_body(ALIVE, 2), view=2)
    assert voter.votes(PREVOTE, 2) == [(NO_DIGEST, False)]
    named = voter.quiet_body([*ALIVE, item_of(claim)], 2)
    assert named.entries != ()


def test_what_came_less_than_a_view_earlier_need_not_be_in_the_cut() -> None:
    voter = settled()
    voter.hear(voter.others[0], claim_of(HEAD, voter.others[0]))
    identity = voter.propose(voter.quiet_body(ALIVE))
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_local_knowledge_does_not_count_against_a_quorum_certificate() -> None:
    voter = settled()
    voter.hear(voter.others[0], claim_of(HEAD, voter.others[0]))
    voter.others_ask_for_view(1, 3)
    voter.wait(100)
    body = voter.quiet_body(ALIVE, 1)
    voter.others_ask_for_view(2, 3)
    identity = voter.propose(body, view=2, qc=voter.qc_of(body_hash(body), 1))
    assert voter.votes(PREVOTE, 2) == [(identity, True)]


def test_any_statement_of_the_slot_satisfies_the_inclusion_rule() -> None:
    voter = OneVoter(HEAD, PEERS)
    more = [alive_of(HEAD, peer, more=True) for peer in PEERS]
    voter.hear_all(*more)
    voter.wait(PROTOCOL.view_timeout(0) + 100)
    voter.hear_all(*(item.signed for item in ALIVE))
    identity = voter.propose(voter.quiet_body([item_of(signed) for signed in more]))
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_a_statement_that_a_cut_names_is_taken_although_its_slot_is_taken() -> None:
    voter = settled()
    named = alive_of(HEAD, voter.others[0], more=True)
    voter.hear(voter.others[0], named)  # older than what is held: not kept, not asked for
    items = [item_of(named), *(item for item in ALIVE if item.signed.peer != named.peer)]
    body = voter.quiet_body(items)
    voter.propose(body)
    assert voter.votes(PREVOTE) == []
    voter.hear(voter.others[0], named)
    assert [held for _, held in voter.votes(PREVOTE)] == [True]


def test_round_min_delays_a_prevote_and_never_makes_it_nil() -> None:
    voter = OneVoter(HEAD, PEERS)
    present = [item for item in ALIVE if item.signed.peer != voter.others[2].peer_id]
    voter.hear_all(*(item.signed for item in present))
    body = voter.quiet_body(present)
    voter.round.voting.begin(0)
    identity = voter.propose(body)
    voter.wait(PROTOCOL.round_min - 100)
    assert voter.votes(PREVOTE) == []
    voter.wait(200)
    assert voter.votes(PREVOTE) == [(identity, True)]


# --- kept parts ------------------------------------------------------------------------------------------------------


def receipt_for(item: Item) -> Receipt:
    return receipt_of(item.signed, PEERS)


def with_updates(me: Identity | None = None) -> tuple[OneVoter, Body, Transition]:
    """A voter in view 0 with a cut of four receipted updates, the body that follows, and its transition."""
    items = trained_items(HEAD, PEERS)
    voter = OneVoter(HEAD, PEERS, me=me)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(receipt_for(item))
    transition = voter.cut(items)
    return voter, body_of(HEAD, transition), transition


def hold_all(voter: OneVoter, body: Body) -> None:
    """Every blob is here, and the recheck of any part agrees."""
    voter.context.held.update(body.parts)
    voter.context.held.update(share.blob for delta in body.shard_delta for share in delta.blobs)
    for effect in voter.effects:
        if isinstance(effect, fx.Aggregate):
            voter.round.parts.rechecked(effect.updates, effect.part, body.parts[effect.part])


def test_in_view_0_kept_parts_are_accepted_only_late() -> None:
    voter, _, transition = with_updates()
    body = body_of(HEAD, transition, kept=[2])
    voter.digests_come(transition, body, [0, 1, 3])
    hold_all(voter, body)
    identity = voter.propose(body)
    hold_all(voter, body)
    wait = voter.terms.transfer_budget_ms - PROTOCOL.view_timeout(0) // 2
    voter.wait(wait - 200)
    assert voter.votes(PREVOTE) == []
    voter.wait(400)
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_a_part_whose_digests_agreed_in_time_may_not_be_kept() -> None:
    voter, full, transition = with_updates()
    voter.digests_come(transition, full, range(4))
    body = body_of(HEAD, transition, kept=[2])
    voter.propose(body)
    hold_all(voter, full)
    voter.wait(100)
    hold_all(voter, full)
    voter.wait(100)
    assert voter.votes(PREVOTE) == [(NO_DIGEST, False)]


def test_a_part_that_this_voter_recomputed_otherwise_gets_nil() -> None:
    voter, body, transition = with_updates()
    voter.digests_come(transition, body, range(4))
    voter.context.held.update(body.parts)
    voter.context.held.update(share.blob for delta in body.shard_delta for share in delta.blobs)
    voter.propose(body)
    for part in range(4):
        voter.round.parts.rechecked(transition.updates_hash, part, digest("not that"))
    voter.wait(100)
    assert voter.votes(PREVOTE) == [(NO_DIGEST, False)]


def test_a_cut_without_updates_keeps_every_part_at_once() -> None:
    voter, _, identity = voted()
    assert voter.votes(PREVOTE) == [(identity, True)]
    assert not any(isinstance(effect, fx.Aggregate) for effect in voter.effects)


# --- views -----------------------------------------------------------------------------------------------------------


def test_a_voter_asks_for_the_next_view_on_its_time_out_and_goes_on_voting() -> None:
    voter = settled()
    timeout = voter.terms.transfer_budget_ms + PROTOCOL.view_timeout(0)
    voter.wait(timeout - 100)
    assert voter.asked_views() == []
    voter.wait(100)
    assert voter.asked_views() == [1]
    assert voter.round.voting.view == 0
    identity = voter.propose(voter.quiet_body(ALIVE))
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_a_cut_gives_the_view_more_time() -> None:
    voter = settled()
    voter.wait(voter.terms.transfer_budget_ms)
    voter.cut(ALIVE)
    voter.wait(voter.terms.transfer_budget_ms + PROTOCOL.view_timeout(0) - 100)
    assert voter.asked_views() == []
    voter.wait(100)
    assert voter.asked_views() == [1]


def test_f_plus_one_others_pull_a_voter_along_and_a_quorum_enters() -> None:
    voter = settled()
    voter.others_ask_for_view(3, 1)
    assert (voter.asked_views(), voter.round.voting.view) == ([], 0)
    voter.others_ask_for_view(3, 2)
    assert (voter.asked_views(), voter.round.voting.view) == ([3], 3)


def test_a_view_is_not_entered_with_less_than_a_quorum() -> None:
    voter = settled()
    voter.others_ask_for_view(1, 1)
    assert voter.round.voting.view == 0
    voter.wait(voter.terms.transfer_budget_ms + PROTOCOL.view_timeout(0))
    assert (voter.asked_views(), voter.round.voting.view) == ([1], 0)
    voter.others_ask_for_view(1, 2)
    assert voter.round.voting.view == 1


def test_nil_votes_do_not_shorten_a_view() -> None:
    voter = settled()
    voter.others_vote(PREVOTE, NO_DIGEST, held=(False,) * 3)
    voter.others_vote(PRECOMMIT, NO_DIGEST, held=(False,) * 3)
    assert (voter.asked_views(), voter.round.voting.view) == ([], 0)


def test_a_view_change_carries_the_highest_quorum_certificate() -> None:
    voter, _, identity = locked()
    voter.wait(2 * voter.terms.transfer_budget_ms + PROTOCOL.view_timeout(0))
    (wish,) = {m.signature: m for _, m in voter.sent if isinstance(m, Signed) and m.body.tag == "view"}.values()
    assert (wish.body.view, wish.body.qc.body) == (1, identity)


def test_votes_far_ahead_are_not_kept() -> None:
    voter = settled()
    for view in (MAX_VIEWS_AHEAD, MAX_VIEWS_AHEAD + 1, 2**40):
        voter.hear(voter.others[0], vote_of(voter.terms, voter.others[0], PREVOTE, NO_DIGEST, view=view))
    assert sorted(voter.round.voting.votes[PREVOTE]) == [MAX_VIEWS_AHEAD]


def test_a_vote_with_a_wrong_signature_or_of_a_stranger_is_refused() -> None:
    voter = settled()
    vote = vote_of(voter.terms, voter.others[0], PREVOTE, NO_DIGEST)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        voter.hear(voter.others[0], msgspec.structs.replace(vote, signature=bytes(64)))
    with pytest.raises(RemoteProtocolError, match="does not vote"):
        voter.hear(voter.others[0], vote_of(voter.terms, identity_of("x"), PREVOTE, NO_DIGEST))
    assert voter.round.voting.votes[PREVOTE].get(0, {}) == {}


def test_two_votes_for_one_slot_are_published_as_evidence() -> None:
    voter, _, identity = voted()
    liar = voter.others[1]
    voter.hear(liar, vote_of(voter.terms, liar, PREVOTE, identity, held=True))
    voter.hear(liar, vote_of(voter.terms, liar, PREVOTE, NO_DIGEST))
    proofs = {m.signature: m for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Evidence)}
    assert len(proofs) == 1
    assert voter.round.voting.votes[PREVOTE][0][liar.peer_id].body.body == identity


def proposed_views(voter: OneVoter) -> list[int]:
    """Views that this voter has proposed in."""
    proposals = [m.proposal for _, m in voter.sent if isinstance(m, ProposalMessage)]
    return sorted({signed.body.view for signed in proposals if signed.peer == voter.me.peer_id})


@pytest.mark.parametrize(("qc_view", "proposed"), [(2, [3]), (3, []), (4, [])])
def test_a_leader_builds_on_an_older_quorum_certificate_and_gives_way_to_one_of_its_view(
    qc_view: int, proposed: list[int]
) -> None:
    voter, body, _ = voted()
    voter.others_vote(PREVOTE, body_hash(body), view=qc_view)
    assert voter.round.voting.qc is not None
    assert voter.round.voting.qc.view == qc_view
    voter.others_ask_for_view(3, 3)  # this voter leads view 3
    assert proposed_views(voter) == proposed
    assert (3 in voter.round.cuts.announced) is bool(proposed)


def test_a_part_whose_result_nobody_here_can_have_is_averaged_by_the_next_in_order() -> None:
    voter, body, transition = with_updates()
    order = voter.terms.aggregators
    part = next(p for p in range(4) if order[p].index(voter.me.peer_id) >= voter.terms.replicas)
    voter.digests_come(transition, body, [part])

    def asked() -> bool:
        return any(isinstance(e, fx.Aggregate) and e.part == part and not e.recheck for e in voter.effects)

    voter.wait(voter.terms.transfer_budget_ms // 2 - 100)
    assert not asked()
    voter.wait(200)
    assert asked()


# --- restarts --------------------------------------------------------------------------------------------------------


def test_after_a_restart_the_same_bytes_leave_again_and_the_lock_stands() -> None:
    voter, _, identity = locked()
    votes = {m.signature for _, m in voter.sent if isinstance(m, Signed) and m.body.tag == "vote"}
    again = OneVoter(HEAD, PEERS, voter.journal)
    assert {m.signature for _, m in again.sent if isinstance(m, Signed) and m.body.tag == "vote"} == votes
    assert again.round.voting.lock is not None
    assert again.round.voting.lock.body == identity
    assert again.round.voting.view == 0
    again.hear_all(*(item.signed for item in ALIVE))
    again.others_ask_for_view(1, 3)
    again.propose(other_body(again, 1), view=1)
    assert again.votes(PREVOTE, 1) == [(NO_DIGEST, False)]


def test_after_a_restart_another_proposal_of_the_view_gets_the_old_vote() -> None:
    voter, _, identity = voted()
    again = settled(journal=voter.journal)
    again.propose(other_body(again, 0))
    assert again.votes(PREVOTE) == [(identity, True)]


def prevoted_with_updates() -> tuple[OneVoter, Digest]:
    """A voter that has prevoted a body of four updates."""
    voter, body, transition = with_updates()
    voter.digests_come(transition, body, range(4))
    hold_all(voter, body)
    identity = voter.propose(body)
    hold_all(voter, body)
    voter.wait(PROTOCOL.round_min)
    assert voter.votes(PREVOTE) == [(identity, True)]
    return voter, identity


def test_after_a_restart_a_prevoted_body_is_known_with_all_that_it_was_made_of() -> None:
    items = trained_items(HEAD, PEERS)
    voter, identity = prevoted_with_updates()
    again = OneVoter(HEAD, PEERS, voter.journal)
    known = again.round.bodies.known[identity]
    assert (known.derived, known.problem) == (True, None)
    assert {item.signed for item in items} <= {held.signed for held in again.round.updates.by_hash.values()}
    assert {receipt.manifest for receipt in again.round.updates.receipts.values()} == {
        item.entry.statement for item in items
    }


def test_a_torn_journal_leaves_nothing_that_is_wrong() -> None:
    voter, _ = prevoted_with_updates()
    entries = list(voter.journal.items())
    for kept in range(len(entries)):
        again = OneVoter(HEAD, PEERS, dict(entries[:kept]))
        assert all(known.problem is None for known in again.round.bodies.known.values())
        assert all(cut.problem is None for cut in again.round.cuts.known.values())


def test_a_quorum_certificate_whose_body_is_lost_makes_a_restarted_voter_ask_for_it() -> None:
    voter = settled()
    body = body_of(HEAD, voter.cut(ALIVE))
    voter.others_vote(PREVOTE, body_hash(body))
    assert voter.round.voting.qc is not None
    again = OneVoter(HEAD, PEERS, voter.journal)
    again.wait(100)
    wanted = [ref for _, message in again.sent if isinstance(message, Want) for ref in message.refs]
    assert Ref(RefKind.BODY, body_hash(body), NO_DIGEST) in wanted
