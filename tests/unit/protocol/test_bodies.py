"""The objective checks of a proposed body, and what a voter brings here to hold it."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.config import MergeConfig, RunConfig, TrainingConfig
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import bitmap, body_hash, cut_hash, pack_float, sign
from spes_p2p.protocol.head import Head, psi_digest
from spes_p2p.protocol.messages import CutAnnouncement, CutMessage, Proposal, ProposalMessage, Ref, Want
from spes_p2p.protocol.transition import Transition, merge_root
from spes_p2p.protocol.wire import NO_DIGEST, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    alive_of,
    body_of,
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
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
MERGE = MergeConfig(alpha=0.1, interval_steps=10, warmup_steps=100)
MERGING = owned_head(PEERS, RunConfig(protocol=QUICK, training=TrainingConfig(inner_steps=((0, 10),), merge=MERGE)))


def settled() -> OneVoter:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in ALIVE))
    return voter


def propose(voter: OneVoter, body: Body, lists: bytes = b"", view: int = 0) -> Digest:
    leader, identity = voter.leaders[view], body_hash(body)
    proposal = Proposal(voter.head.run.run_id, voter.head.epoch, voter.terms.round, view, identity, None)
    voter.hear(leader, ProposalMessage(sign(leader, proposal), body, lists))
    return identity


def with_updates(head: Head = HEAD, voter: OneVoter | None = None) -> tuple[OneVoter, Transition]:
    items = trained_items(head, PEERS)
    voter = voter or OneVoter(head, PEERS)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
    return voter, voter.cut(items)


def nils(voter: OneVoter, view: int = 0) -> bool:
    return voter.votes(Step.PREVOTE, view) == [(NO_DIGEST, False)]


def why(voter: OneVoter) -> list[str]:
    return [e.text for e in voter.effects if isinstance(e, fx.Notify) and "prevote nil" in e.text]


# --- the body and its cut --------------------------------------------------------------------------------------------


def test_merge_lists_that_do_not_match_their_root_are_refused() -> None:
    voter = settled()
    body = voter.quiet_body(ALIVE)
    merging = msgspec.structs.replace(body, merge_alpha=pack_float(0.1), merge_root=merge_root(b"lists"))
    for wrong, lists in ((merging, b"other"), (msgspec.structs.replace(body, merge_root=merge_root(b"")), b"")):
        with pytest.raises(RemoteProtocolError, match="do not match their root"):
            propose(voter, wrong, lists)
    assert voter.votes(Step.PREVOTE) == []


def test_merge_lists_without_a_merge_are_refused() -> None:
    voter = settled()
    with pytest.raises(RemoteProtocolError, match="merge lists without a merge"):
        propose(voter, voter.quiet_body(ALIVE), b"lists")


def test_a_body_made_from_a_wrong_cut_gets_nil() -> None:
    voter = settled()
    twice = [item_of(claim_of(HEAD, voter.others[0], capacity)) for capacity in (1, 2)]
    cut, _ = cut_of(HEAD, [*ALIVE, *twice])
    leader = voter.leaders[0]
    voter.hear(leader, CutMessage(sign(leader, CutAnnouncement(HEAD.run.run_id, 0, 2, 0, cut_hash(cut))), cut))
    voter.hear(voter.others[0], *(item.signed for item in twice))
    propose(voter, msgspec.structs.replace(body_of(HEAD, transition_of(HEAD, ALIVE)), cut=cut_hash(cut)))
    assert nils(voter)
    assert why(voter) == ["view 0: prevote nil: its cut is wrong: the cut has two items for one slot"]


def test_a_body_whose_cut_is_not_here_waits_for_it() -> None:
    voter = settled()
    body = body_of(HEAD, transition_of(HEAD, ALIVE))
    identity = propose(voter, body)
    wanted = Ref(RefKind.CUT, body.cut, NO_DIGEST)
    assert [m.refs for _, m in voter.sent if isinstance(m, Want)] == [(wanted,)]
    assert voter.votes(Step.PREVOTE) == []
    voter.hear(voter.leaders[0], cut_of(HEAD, ALIVE)[0])
    voter.wait(1)
    assert voter.votes(Step.PREVOTE) == [(identity, True)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kept": b"\xff\xff"}, "bitmap of 2 bytes for 4 bits"),
        ({"kept": b"\xf0"}, "bitmap has a bit beyond 4"),
        ({"parts": HEAD.parts[:3]}, "wrong number of parts"),
        ({"kept": bitmap({0, 1, 2}, 4)}, "parts that change without an update"),
        ({"parts": (digest("x"), *HEAD.parts[1:])}, "not what follows from the certificate and the cut"),
        ({"psi": psi_digest(HEAD.parts[:1])}, "not what follows from the certificate and the cut"),
    ],
)
def test_parts_that_nobody_agreed_on_get_nil(change: dict[str, object], reason: str) -> None:
    voter = settled()
    propose(voter, msgspec.structs.replace(voter.quiet_body(ALIVE), **change))
    assert nils(voter)
    assert why(voter) == [f"view 0: prevote nil: {reason}"]


def test_what_a_voter_lacks_is_fetched_and_then_it_holds_the_body() -> None:
    voter, transition = with_updates()
    body = body_of(HEAD, transition)
    voter.digests_come(transition, body, range(4))
    identity = propose(voter, body)
    fetched = {e.blob: e.max_bytes for e in voter.effects if isinstance(e, fx.FetchBlob)}
    experts = {share.blob for delta in body.shard_delta for share in delta.blobs}
    assert fetched == {**dict.fromkeys(body.parts, 40_000), **dict.fromkeys(experts, 100_000)}
    assert all(e.sources and voter.me.peer_id not in e.sources for e in voter.effects if isinstance(e, fx.FetchBlob))
    known = voter.round.bodies.known[identity]
    for blob in sorted(fetched):
        assert not known.held
        voter.round.local(fx.BlobHeld(blob=blob))
        voter.wait(1)
    assert known.held


def test_nothing_is_held_before_the_state_of_the_round_is() -> None:
    voter = settled()
    voter.context.state_ready = False
    identity = propose(voter, voter.quiet_body(ALIVE))
    assert not voter.round.bodies.known[identity].held
    assert voter.votes(Step.PREVOTE) == []
    voter.context.state_ready = True
    voter.wait(1)
    assert voter.votes(Step.PREVOTE) == [(identity, True)]


def test_a_member_without_a_vote_asks_for_no_digests() -> None:
    newcomer = identity_of("newcomer")
    head = follow(HEAD, [*ALIVE, item_of(join_of(HEAD, newcomer))])
    items = trained_items(head, PEERS)
    for me, num_asked in ((newcomer, 0), (None, 1)):
        voter = OneVoter(head, PEERS, me=me)
        assert voter.context.is_voter == (me is None)
        voter.hear_all(*(item.signed for item in items))
        for item in items:
            voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
        transition = voter.cut(items)
        propose(voter, body_of(head, transition))
        digests = Ref(RefKind.DIGESTS, transition.updates_hash, NO_DIGEST)
        assert sum(m.refs == (digests,) for _, m in voter.sent if isinstance(m, Want)) == num_asked


# --- merges ----------------------------------------------------------------------------------------------------------


def merging(lists: bytes = b"lists") -> tuple[OneVoter, Body, Digest]:
    """A voter that holds everything which a body with a merge names; the ranking is still to be checked."""
    voter, transition = with_updates(MERGING)
    body = body_of(MERGING, transition, merge_lists=lists)
    voter.digests_come(transition, body, range(4))
    identity = propose(voter, body, lists)
    assert not any(isinstance(effect, fx.CheckRanking) for effect in voter.effects)
    voter.context.held.update(body.parts)
    voter.context.held.update(share.blob for delta in body.shard_delta for share in delta.blobs)
    for effect in voter.effects:
        if isinstance(effect, fx.Aggregate):
            voter.round.parts.rechecked(effect.updates, effect.part, body.parts[effect.part])
    voter.wait(QUICK.round_min)
    return voter, body, identity


def test_a_merge_is_prevoted_once_its_ranking_is_found_right() -> None:
    voter, body, identity = merging()
    (check,) = [effect for effect in voter.effects if isinstance(effect, fx.CheckRanking)]
    assert (check.body, check.merge_lists, len(check.shards)) == (identity, b"lists", 8)
    assert voter.votes(Step.PREVOTE) == []
    voter.round.local(fx.RankingChecked(body=digest("unknown"), problem="ignored"))
    voter.round.local(fx.RankingChecked(body=identity, problem=None))
    voter.wait(QUICK.view_timeout(0))
    assert voter.votes(Step.PREVOTE) == [(identity, True)]
    assert body.merge_root == merge_root(b"lists")


def test_a_wrong_ranking_gets_nil() -> None:
    voter, _, identity = merging()
    voter.round.local(fx.RankingChecked(body=identity, problem="another order"))
    voter.wait(1)
    assert nils(voter)
    assert why(voter) == ["view 0: prevote nil: merge lists: another order"]


def test_f_plus_one_holders_stand_for_the_ranking_too() -> None:
    voter, _, identity = merging()
    for peer in voter.others[:2]:
        voter.hear(peer, vote_of(voter.terms, peer, Step.PREVOTE, identity, held=True))
    voter.wait(QUICK.view_timeout(0))
    assert voter.votes(Step.PREVOTE) == [(identity, True)]
