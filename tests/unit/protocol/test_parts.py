"""Who averages which part, whose digests count, and the recheck that only its voter can foretell."""

from __future__ import annotations

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import PartDigest, Signed
from spes_p2p.protocol.transition import Transition
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    alive_of,
    body_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    receipt_of,
    trained_items,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
RUN = HEAD.run.run_id
UPDATES = digest("updates")
TERMS = Terms(HEAD)


def num_near(peer: Identity) -> int:
    """How many parts a peer averages at once."""
    return sum(peer.peer_id in order[: TERMS.replicas] for order in TERMS.aggregators)


ME = next(peer for peer in PEERS if num_near(peer) in (1, 2) and peer.peer_id != TERMS.leader(0))


def with_cut(*, ready: bool = True) -> tuple[OneVoter, Body, Transition]:
    items = trained_items(HEAD, PEERS)
    voter = OneVoter(HEAD, PEERS, me=ME)
    voter.context.state_ready = ready
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
    transition = voter.cut(items)
    return voter, body_of(HEAD, transition), transition


def averaged(voter: OneVoter, *, recheck: bool = False) -> list[int]:
    return [e.part for e in voter.effects if isinstance(e, fx.Aggregate) and e.recheck is recheck]


def places(voter: OneVoter) -> dict[int, int]:
    """Part -> this peer's place in its order."""
    return {part: order.index(voter.me.peer_id) for part, order in enumerate(voter.terms.aggregators)}


def says(voter: OneVoter, number: int, part: int, value: Digest, updates: Digest = UPDATES) -> None:
    peer = voter.others[number]
    voter.hear_digest(sign(peer, PartDigest(RUN, 0, 2, part, updates, value)))


# --- averaging -------------------------------------------------------------------------------------------------------


def test_the_first_in_order_average_a_part_at_once() -> None:
    voter, _, transition = with_cut()
    near = [part for part, place in places(voter).items() if place < voter.terms.replicas]
    assert averaged(voter) == near
    assert 1 <= len(near) < 4
    for effect in voter.effects:
        if isinstance(effect, fx.Aggregate):
            assert (effect.updates, effect.previous) == (transition.updates_hash, HEAD.parts[effect.part])
            assert [c.peer for c in effect.contributions] == [peer.peer_id for peer in PEERS]
            blobs = {c.pieces[effect.part].blob: c.peer for c in effect.contributions}
            assert {blob: sources[0] for blob, sources in effect.sources.items()} == blobs


def test_later_ones_step_in_after_half_of_the_budget_for_parts_whose_agreed_result_is_not_here() -> None:
    voter, body, transition = with_cut()
    far = [part for part, place in places(voter).items() if place >= voter.terms.replicas]
    assert len(far) >= 2
    voter.digests_come(transition, body, far[:2])
    voter.context.held.add(body.parts[far[0]])  # of the second, only the digests are here
    before = averaged(voter)
    voter.wait(voter.terms.transfer_budget_ms // 2 - 100)
    assert averaged(voter) == before
    voter.wait(200)
    assert averaged(voter) == [*before, *far[1:]]
    voter.wait(200)
    assert averaged(voter) == [*before, *far[1:]]


def test_nothing_is_averaged_before_the_state_is_here() -> None:
    voter, _, _ = with_cut(ready=False)
    assert averaged(voter) == []
    voter.context.state_ready = True
    voter.wait(1)
    assert averaged(voter) != []


def test_members_that_are_not_eligible_average_nothing() -> None:
    x = identity_of("x")
    head = follow(HEAD, [*(item_of(alive_of(HEAD, peer)) for peer in PEERS), item_of(join_of(HEAD, x))])
    items = trained_items(head, PEERS)
    voter = OneVoter(head, PEERS, me=x)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        voter.round.updates.add_receipt(receipt_of(item.signed, PEERS))
    voter.cut(items)
    voter.wait(voter.terms.transfer_budget_ms)
    assert averaged(voter) == []


def test_a_result_is_held_and_its_digest_goes_to_all_voters() -> None:
    voter, body, transition = with_cut()
    (part, *_) = averaged(voter)
    voter.round.local(fx.Aggregated(updates=transition.updates_hash, part=part, digest=body.parts[part], recheck=False))
    voter.wait(1)
    sent = [(to, m) for to, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, PartDigest)]
    assert {to for to, _ in sent} == {peer.peer_id for peer in voter.others}
    assert {(m.body.part, m.body.updates, m.body.digest) for _, m in sent} == {
        (part, transition.updates_hash, body.parts[part])
    }
    assert body.parts[part] in voter.context.held
    assert voter.round.parts.supporters(transition.updates_hash, part, body.parts[part]) == (voter.me.peer_id,)


# --- digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_names_a_part_that_exists_and_comes_from_an_eligible_peer() -> None:
    voter, x = OneVoter(HEAD, PEERS), identity_of("x")
    cases = [
        (sign(voter.others[0], PartDigest(RUN, 0, 2, 4, UPDATES, digest("a"))), "malformed part digest"),
        (vote_of(voter.terms, voter.others[0], Step.PREVOTE, NO_DIGEST), "malformed part digest"),
        (sign(x, PartDigest(RUN, 0, 2, 0, UPDATES, digest("a"))), "does not aggregate"),
    ]
    for signed, why in cases:
        with pytest.raises(RemoteProtocolError, match=why):
            voter.hear_digest(signed)
    assert voter.round.parts.everything() == []


def test_replicas_equal_digests_make_a_result() -> None:
    voter = OneVoter(HEAD, PEERS)
    assert voter.terms.replicas == 2
    says(voter, 0, 1, digest("a"))
    says(voter, 1, 1, digest("b"))
    assert voter.round.parts.result(UPDATES, 1) is None
    voter.wait(100)
    says(voter, 2, 1, digest("b"))
    assert voter.round.parts.result(UPDATES, 1) == digest("b")
    assert voter.round.parts.result(UPDATES, 0) is None
    assert not voter.round.parts.agreed_before(UPDATES, 1, 99)
    assert voter.round.parts.agreed_before(UPDATES, 1, 100)


def test_digests_over_different_updates_do_not_add_up_and_their_number_is_bounded() -> None:
    voter = OneVoter(HEAD, PEERS)
    for number in range(70):
        says(voter, 0, 1, digest("a"), digest("updates", number))
    says(voter, 0, 2, digest("a"), digest("updates", 0))  # a set that it has named before
    assert len(voter.round.parts.everything()) == 64 + 1
    assert len(voter.round.parts.all_signed(digest("updates", 0))) == 2
    assert voter.round.parts.all_signed(digest("updates", 69)) == []
    assert voter.round.parts.result(digest("updates", 0), 1) is None


# --- the recheck -----------------------------------------------------------------------------------------------------


def held_by_others(voter: OneVoter, body: Body, transition: Transition) -> Digest:
    """All digests and a proposal are here, and every blob."""
    voter.digests_come(transition, body, range(4))
    voter.context.held.update(body.parts)
    voter.context.held.update(share.blob for delta in body.shard_delta for share in delta.blobs)
    return voter.propose(body)


def test_one_part_is_recomputed_unless_this_peer_averages_it_anyhow() -> None:
    voter, body, transition = with_cut()
    held_by_others(voter, body, transition)
    voter.wait(100)
    asked = set(averaged(voter)) | set(averaged(voter, recheck=True))
    assert len(averaged(voter, recheck=True)) <= 1
    assert len(asked) == len(averaged(voter)) + len(averaged(voter, recheck=True))
    assert voter.votes(Step.PREVOTE) == []


def recheck_of(voter: OneVoter, body: Body, transition: Transition, kept: frozenset[int]) -> bool | None:
    return voter.round.parts.recheck(transition, kept, body.parts)


def test_the_recheck_is_over_the_parts_that_change() -> None:
    for kept in (frozenset({0, 1, 2}), frozenset({1, 2, 3})):
        voter, body, transition = with_cut()
        (drawn,) = {0, 1, 2, 3} - kept
        assert recheck_of(voter, body, transition, kept) is None
        voter.round.parts.rechecked(transition.updates_hash, (drawn + 1) % 4, digest("of another part"))
        assert recheck_of(voter, body, transition, kept) is None
        voter.round.parts.rechecked(transition.updates_hash, drawn, body.parts[drawn])
        assert recheck_of(voter, body, transition, kept) is True
        voter.round.parts.rechecked(transition.updates_hash, drawn, digest("another value"))
        assert recheck_of(voter, body, transition, kept) is False


def test_nothing_is_rechecked_if_all_parts_are_kept_and_not_before_the_state_is_here() -> None:
    voter, body, transition = with_cut(ready=False)
    assert recheck_of(voter, body, transition, frozenset(range(4))) is True
    assert recheck_of(voter, body, transition, frozenset()) is None
    voter.wait(1)
    assert averaged(voter, recheck=True) == []
    voter.context.state_ready = True
    for kept in (frozenset({1, 2, 3}), frozenset({0, 2, 3}), frozenset({0, 1, 3}), frozenset({0, 1, 2})):
        recheck_of(voter, body, transition, kept)
    voter.wait(1)
    assert len(averaged(voter, recheck=True)) <= 1  # one recheck for one set of updates


def test_a_recheck_that_does_not_end_is_told_and_the_vote_goes_on() -> None:
    voter, body, transition = with_cut()
    identity = held_by_others(voter, body, transition)
    voter.wait(QUICK.view_timeout(0) // 2 - 100)
    assert voter.votes(Step.PREVOTE) == []
    voter.wait(100)
    assert voter.votes(Step.PREVOTE) == [(identity, True)]
    notes = [e.text for e in voter.effects if isinstance(e, fx.Notify)]
    assert "the recheck of a part did not end in time" in notes


def test_a_recheck_is_asked_for_as_one_and_its_result_signs_nothing() -> None:
    voter, body, transition = with_cut()
    far = next(part for part, place in places(voter).items() if place >= voter.terms.replicas)
    recheck_of(voter, body, transition, frozenset(range(4)) - {far})
    voter.wait(1)
    assert averaged(voter, recheck=True) == [far]
    voter.round.local(fx.Aggregated(updates=transition.updates_hash, part=far, digest=digest("x"), recheck=True))
    voter.wait(1)
    assert not any(isinstance(m, Signed) and isinstance(m.body, PartDigest) for _, m in voter.sent)
    assert recheck_of(voter, body, transition, frozenset(range(4)) - {far}) is False
    near = next(part for part, place in places(voter).items() if place < voter.terms.replicas)
    other, body, transition = with_cut()
    recheck_of(other, body, transition, frozenset(range(4)) - {near})
    other.wait(1)
    assert averaged(other, recheck=True) == []  # it is being averaged here already


def test_a_part_that_this_voter_recomputed_otherwise_does_not_count_against_a_quorum_certificate() -> None:
    voter, body, transition = with_cut()
    identity = held_by_others(voter, body, transition)
    for part in range(4):
        voter.round.parts.rechecked(transition.updates_hash, part, digest("another value"))
    voter.wait(100)
    assert voter.votes(Step.PREVOTE) == [(NO_DIGEST, False)]
    view = next(number for number in (1, 2) if voter.leaders[number] != voter.me)
    voter.others_ask_for_view(view, 3)
    voter.propose(body, view=view, qc=voter.qc_of(identity, 0))
    assert voter.votes(Step.PREVOTE, view) == [(identity, True)]
