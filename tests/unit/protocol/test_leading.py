"""What the leader of a view names and proposes, and when."""

from __future__ import annotations

from spes_p2p.config import MergeConfig, RunConfig, TrainingConfig
from spes_p2p.crypto import Identity
from spes_p2p.digests import digest
from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import bits, body_hash, cut_hash
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import CutMessage, ProposalMessage, QuorumCertificate
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import Transition, make_body
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    alive_of,
    body_of,
    claim_of,
    cut_of,
    identities,
    item_of,
    owned_head,
    receipt_of,
    trained_items,
    transition_of,
)

PEERS = identities(4)
HEAD = owned_head(PEERS)
MERGE = MergeConfig(alpha=0.1, interval_steps=10, warmup_steps=100)
MERGING = owned_head(PEERS, RunConfig(protocol=QUICK, training=TrainingConfig(inner_steps=((0, 10),), merge=MERGE)))
BUDGET = Terms(HEAD).transfer_budget_ms


def leader_of(view: int, head: Head = HEAD, journal: dict[str, bytes] | None = None) -> OneVoter:
    by_id = {peer.peer_id: peer for peer in PEERS}
    return OneVoter(head, PEERS, journal, me=by_id[Terms(head).leaders[view]])


def alive(head: Head, *peers: Identity) -> list[Item]:
    return [item_of(alive_of(head, peer)) for peer in peers or PEERS]


def hear(voter: OneVoter, items: list[Item]) -> None:
    voter.hear_all(*(item.signed for item in items))


def hear_updates(voter: OneVoter) -> Transition:
    """Everybody's update and its receipt; returns what follows from a cut of all."""
    items = trained_items(voter.head, PEERS)
    hear(voter, items)
    for item in items:
        voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
    voter.wait(1)
    return transition_of(voter.head, items)


def cuts(voter: OneVoter) -> list[CutMessage]:
    found = {m.announcement.signature: m for _, m in voter.sent if isinstance(m, CutMessage)}
    return list(found.values())


def proposals(voter: OneVoter) -> list[ProposalMessage]:
    found = {m.proposal.signature: m for _, m in voter.sent if isinstance(m, ProposalMessage)}
    return list(found.values())


def qc_behind(message: ProposalMessage) -> QuorumCertificate | None:
    return message.proposal.body.qc


# --- view 0 ----------------------------------------------------------------------------------------------------------


def test_the_leader_names_what_it_holds_and_proposes_what_follows() -> None:
    voter = leader_of(0)
    hear(voter, alive(HEAD))
    (cut,) = cuts(voter)
    assert cut.cut == cut_of(HEAD, alive(HEAD))[0]
    assert (cut.announcement.body.view, cut.announcement.body.cut) == (0, cut_hash(cut.cut))
    assert {to for to, m in voter.sent if m == cut} == {peer.peer_id for peer in voter.others}
    (proposal,) = proposals(voter)
    assert proposal.body == body_of(HEAD, transition_of(HEAD, alive(HEAD)))
    assert qc_behind(proposal) is None


def test_nobody_but_the_leader_names_a_cut() -> None:
    voter = leader_of(1)
    hear(voter, alive(HEAD))
    assert (voter.round.voting.view, cuts(voter), voter.round.leader.num_cuts) == (0, [], 0)


def test_the_leader_waits_for_the_receipts_of_the_manifests_it_holds_at_most_t() -> None:
    voter = leader_of(0)
    items = trained_items(HEAD, PEERS)
    hear(voter, items)
    assert voter.round.voting.view == 0
    voter.wait(BUDGET - 100)
    assert cuts(voter) == []
    voter.wait(100)
    (cut,) = cuts(voter)
    assert cut.cut == cut_of(HEAD, [item_of(item.signed) for item in items])[0]  # all as signs of life


def test_no_cut_before_round_min_unless_all_live_members_are_in() -> None:
    voter = leader_of(0)
    hear(voter, alive(HEAD, *voter.others[:2]))
    voter.round.voting.begin(0)
    voter.wait(QUICK.round_min - 100)
    assert cuts(voter) == []
    voter.wait(100)
    assert [len(cut.cut.items) for cut in cuts(voter)] == [2]


def test_the_leader_waits_for_equal_digests_and_proposes_when_the_last_is_here() -> None:
    voter = leader_of(0)
    transition = hear_updates(voter)
    body = body_of(HEAD, transition)
    voter.digests_come(transition, body, [0, 1, 2])
    assert (len(cuts(voter)), proposals(voter)) == (1, [])
    voter.digests_come(transition, body, [3])
    assert [proposal.body for proposal in proposals(voter)] == [body]


def test_parts_without_equal_digests_are_kept_once_t_has_passed() -> None:
    voter = leader_of(0)
    transition = hear_updates(voter)
    body = body_of(HEAD, transition)
    voter.digests_come(transition, body, [0, 2])
    voter.wait(BUDGET - 200)
    assert proposals(voter) == []
    voter.wait(300)
    (proposal,) = proposals(voter)
    assert bits(proposal.body.kept, 4) == {1, 3}
    assert proposal.body.parts == (body.parts[0], HEAD.parts[1], body.parts[2], HEAD.parts[3])


def test_after_a_restart_the_leader_names_and_proposes_the_same_again() -> None:
    voter = leader_of(0)
    hear(voter, alive(HEAD))
    again = leader_of(0, journal=voter.journal)
    hear(again, [*alive(HEAD), item_of(claim_of(HEAD, again.others[0]))])
    assert cuts(again) == cuts(voter)
    assert proposals(again) == proposals(voter)


def test_a_leader_that_lost_what_its_cut_names_proposes_once_it_has_it_again() -> None:
    voter = leader_of(0)
    transition = hear_updates(voter)
    body = body_of(HEAD, transition)
    again = leader_of(0, journal=voter.journal)
    again.digests_come(transition, body, range(4))
    again.wait(100)
    assert (cuts(again), proposals(again)) == (cuts(voter), [])
    hear_updates(again)
    assert [proposal.body for proposal in proposals(again)] == [body]


# --- later views -----------------------------------------------------------------------------------------------------


def test_a_later_leader_uses_the_cut_it_knows_if_that_names_all_it_holds() -> None:
    voter = leader_of(1)
    hear(voter, alive(HEAD))
    voter.cut(alive(HEAD))
    voter.others_ask_for_view(1, 3)
    assert [cut.cut for cut in cuts(voter)] == [cut_of(HEAD, alive(HEAD))[0]]
    assert [proposal.body for proposal in proposals(voter)] == [body_of(HEAD, transition_of(HEAD, alive(HEAD)))]


def test_a_later_leader_cuts_anew_if_the_known_cut_leaves_something_out() -> None:
    voter = leader_of(1)
    hear(voter, alive(HEAD))
    claim = claim_of(HEAD, voter.others[0])
    voter.cut(alive(HEAD))
    voter.hear_all(claim)
    voter.others_ask_for_view(1, 3)
    assert [cut.cut for cut in cuts(voter)] == [cut_of(HEAD, [*alive(HEAD), item_of(claim)])[0]]


def certified(voter: OneVoter, items: list[Item]) -> tuple[Body, Digest]:
    """The leader of view 0 proposed the body of these items, and a quorum prevoted it."""
    body = voter.quiet_body(items)
    identity = voter.propose(body)
    voter.others_vote(Step.PREVOTE, identity)
    return body, identity


def test_a_later_leader_proposes_the_body_of_the_quorum_certificate_it_knows() -> None:
    voter = leader_of(1)
    hear(voter, alive(HEAD))
    body, identity = certified(voter, alive(HEAD))
    voter.hear_all(claim_of(HEAD, voter.others[0]))  # which that cut leaves out
    voter.others_ask_for_view(1, 3)
    assert [cut.cut for cut in cuts(voter)] == [cut_of(HEAD, alive(HEAD))[0]]
    (proposal,) = proposals(voter)
    assert proposal.body == body
    qc = qc_behind(proposal)
    assert qc is not None
    assert (qc.body, qc.view) == (identity, 0)


def test_a_later_leader_that_lacks_the_certified_body_asks_for_it_and_names_nothing() -> None:
    voter = leader_of(1)
    hear(voter, alive(HEAD))
    body = body_of(HEAD, transition_of(HEAD, alive(HEAD)))
    voter.others_ask_for_view(1, 3, voter.qc_of(body_hash(body), 0))
    assert voter.round.voting.view == 1
    assert (cuts(voter), proposals(voter)) == ([], [])


# --- merges ----------------------------------------------------------------------------------------------------------


def merging_leader() -> tuple[OneVoter, Transition, Body]:
    """A leader with its cut, and all digests; the merge lists are still to come."""
    voter = leader_of(0, MERGING)
    transition = hear_updates(voter)
    results = body_of(MERGING, transition, merge_lists=b"lists")
    voter.digests_come(transition, results, range(4))
    return voter, transition, results


def ranks(voter: OneVoter) -> list[fx.RankExperts]:
    return [effect for effect in voter.effects if isinstance(effect, fx.RankExperts)]


def test_the_leader_of_a_merge_brings_the_experts_ranks_them_and_then_proposes() -> None:
    voter, transition, body = merging_leader()
    blobs = {share.blob for delta in body.shard_delta for share in delta.blobs}
    assert len(blobs) == 8
    assert {effect.blob for effect in voter.effects if isinstance(effect, fx.FetchBlob)} >= blobs
    assert (ranks(voter), proposals(voter)) == ([], [])
    for blob in sorted(blobs):
        voter.round.local(fx.BlobHeld(blob=blob))
    voter.wait(100)
    (rank,) = ranks(voter)
    assert (rank.cut, rank.shards) == (transition.cut, tuple(row.blobs for row in transition.state.shards))
    voter.wait(2_000)
    assert (len(ranks(voter)), proposals(voter)) == (1, [])
    voter.round.local(fx.Ranked(cut=rank.cut, merge_lists=b"lists"))
    voter.wait(100)
    assert [(proposal.body, proposal.merge_lists) for proposal in proposals(voter)] == [(body, b"lists")]
    assert body == make_body(voter.terms, transition, body.parts, b"lists")


def test_experts_that_a_ranking_lacks_are_asked_for_again_after_a_resend() -> None:
    voter, _, body = merging_leader()
    blobs = {share.blob for delta in body.shard_delta for share in delta.blobs} - voter.context.held
    voter.effects.clear()
    voter.wait(QUICK.resend_ms)
    again = [effect for effect in voter.effects if isinstance(effect, fx.FetchBlob) and effect.blob in blobs]
    assert {effect.blob for effect in again} == blobs
    assert {effect.max_bytes for effect in again} == {100_000}
    assert {effect.sources[0] for effect in again} == {peer.peer_id for peer in PEERS}  # the authors first


# --- a leader that comes too late ------------------------------------------------------------------------------------


def test_a_leader_names_no_cut_once_a_quorum_has_voted_in_its_view_or_a_later_one() -> None:
    for qc_view in (0, 1):
        voter = leader_of(0)
        hear(voter, alive(HEAD, *voter.others[:2]))
        voter.round.voting.begin(0)
        voter.others_ask_for_view(2, 1, voter.qc_of(digest("body"), qc_view))
        hear(voter, alive(HEAD, *voter.others))
        voter.wait(QUICK.round_min)
        assert (voter.round.voting.view, cuts(voter), proposals(voter)) == (0, [], [])


def test_a_leader_proposes_nothing_once_a_quorum_has_voted_in_its_view_or_a_later_one() -> None:
    for qc_view in (0, 1):
        voter = leader_of(0)
        transition = hear_updates(voter)
        assert len(cuts(voter)) == 1
        voter.others_ask_for_view(2, 1, voter.qc_of(digest("body"), qc_view))
        voter.digests_come(transition, body_of(HEAD, transition), range(4))
        assert (voter.round.voting.view, proposals(voter)) == (0, [])
