"""Byzantine peers split the voters: two valid bodies for one view, hidden decisions, twins, withheld results."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import decode
from spes_p2p.protocol.messages import Signed, Vote
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.adversary import TwoFaced, add_twin, withhold_results
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, head_after, lost_blobs, swarm_in_round, updates_of, view_of
from spes_p2p.testing.swarm import SimPeer, Swarm

APART_UNTIL_MS = 19_000
"""Round 3 of eight seconds is decided at 17.7 s."""


def ids(peers: list[SimPeer]) -> frozenset[PeerId]:
    return frozenset(peer.peer_id for peer in peers)


def keep_apart(swarm: Swarm, half: frozenset[PeerId], liars: frozenset[PeerId]) -> None:
    """For some seconds no vote and no certificate of round 3 passes between the honest halves."""

    def route(sender: SimPeer, send: fx.Send) -> PeerId | None:
        message = decode(send.data)
        tells = isinstance(message, Certificate) or (isinstance(message, Signed) and isinstance(message.body, Vote))
        crosses = (sender.peer_id in half) != (send.to in half) and not liars & {sender.peer_id, send.to}
        return None if tells and crosses and swarm.now_ms < APART_UNTIL_MS else send.to

    swarm.route = route


def two_faces(num_founders: int) -> tuple[Swarm, list[SimPeer], list[SimPeer], TwoFaced]:
    """f liars, of whom one leads round 3, show two bodies to two halves; the swarm, liars, honest peers, the lie."""
    swarm, order = swarm_in_round(3, num_founders)
    num_liars = (num_founders - 1) // 3
    liars, honest = order[:num_liars], order[num_liars:]
    half = honest[len(honest) // 2 :]
    lie = TwoFaced(swarm=swarm, leader=liars[0], round=3, second=ids(half), accomplices=liars[1:])
    lie.begin()
    keep_apart(swarm, lie.second, ids(liars))
    return swarm, liars, honest, lie


def check_two_faces(num_founders: int) -> None:
    swarm, _, honest, lie = two_faces(num_founders)
    assert swarm.run_to_round(6, 10 * MINUTE_MS, honest)
    assert len({lie.shown[peer.peer_id] for peer in honest}) == 2
    assert len(hashes_of(honest, 3)) == 1
    assert view_of(honest[0], 3) == 0
    assert all(ids(honest) <= updates_of(honest[0], number) for number in (3, 4, 5, 6))


def test_two_valid_bodies_for_one_view_make_one_certificate_of_four() -> None:
    check_two_faces(4)


def test_two_valid_bodies_for_one_view_make_one_certificate_of_seven() -> None:
    check_two_faces(7)


def test_who_voted_for_both_bodies_is_evicted_by_its_signature_in_the_certificate() -> None:
    swarm, liars, honest, lie = two_faces(4)
    assert swarm.run_to_round(5, 10 * MINUTE_MS, honest)
    assert lie.shown[honest[0].peer_id] != head_after(honest[0], 3).hash
    assert liars[0].peer_id in head_after(honest[0], 3).state.voters
    assert liars[0].peer_id not in head_after(honest[0], 4).state.members
    assert head_after(honest[0], 4).state.voters == tuple(sorted(ids(honest)))


def test_a_lock_keeps_what_one_voter_decided_unseen() -> None:
    """One voter decides in view 0 and is cut off; the leader of view 1 proposes another valid body.

    Only the lock of the one other voter that precommitted stands against it.
    """
    swarm, order = swarm_in_round(3, 4)
    decider, liar, locked, free = order
    TwoFaced(swarm=swarm, leader=liar, round=3, view=1, second=ids(order)).begin()

    def route(sender: SimPeer, send: fx.Send) -> PeerId | None:
        if decider.machine.head.round >= 3 and decider.peer_id in (sender.peer_id, send.to):
            return None
        message = decode(send.data)
        if isinstance(message, Signed) and isinstance(message.body, Vote) and message.body.view == 0:
            if message.body.step is Step.PRECOMMIT and send.to != decider.peer_id:
                return None
            if message.body.step is Step.PREVOTE and send.to == free.peer_id:
                return None
        return send.to

    swarm.route = route
    assert swarm.run(lambda: decider.machine.head.round == 3, 5 * MINUTE_MS)
    lock = locked.machine._round.voting.lock
    assert lock is not None
    assert (lock.view, lock.body) == (0, head_after(decider, 3).hash)
    assert free.machine._round.voting.lock is None
    assert swarm.run_to_round(3, 10 * MINUTE_MS, [locked, free])
    swarm.route = lambda sender, send: send.to
    assert len(hashes_of([decider, locked, free], 3)) == 1
    assert view_of(locked, 3) == 2
    assert swarm.run_to_round(6, 10 * MINUTE_MS, [decider, locked, free])


def test_twins_with_one_key_on_both_sides_of_a_partition_certify_on_one_side_only() -> None:
    swarm, order = swarm_in_round(3, 4)
    lone, key, first, second = order
    add_twin(swarm, key, ids([lone]))
    assert swarm.run_to_round(6, 10 * MINUTE_MS, [first, second])
    assert lone.machine.head.round == 2
    swarm.route = lambda sender, send: send.to
    assert swarm.run_to_round(8, 10 * MINUTE_MS, [lone, first, second])
    assert len(hashes_of([lone, first, second], 6)) == 1


def withheld_results(says: Callable[[Digest], Digest]) -> tuple[list[SimPeer], set[Digest]]:
    """Both first aggregators of a part are liars, who serve the result to nobody: the honest, and what is signed."""
    swarm, order = swarm_in_round(3, 7)
    first_two = order[0].machine.terms.aggregators[0][:2]
    liars = [swarm.peers[peer] for peer in first_two]
    honest = [peer for peer in order if peer not in liars]
    said = withhold_results(swarm, liars, says)
    assert swarm.run(lambda: any(peer.machine.head.round == 3 for peer in honest), 2 * MINUTE_MS)
    assert lost_blobs(next(peer.machine.head for peer in honest if peer.machine.head.round == 3), honest) == set()
    assert swarm.run_to_round(5, 5 * MINUTE_MS, honest)
    return honest, said


def test_a_result_that_nobody_can_get_is_not_certified_before_an_honest_peer_has_made_it() -> None:
    honest, _ = withheld_results(lambda value: value)
    assert [updates_of(honest[0], number) >= ids(honest) for number in (3, 4, 5)] == [True] * 3
    assert [head_after(honest[0], number).parts[0] in honest[0].blobs for number in (3, 4, 5)] == [True] * 3


def test_a_made_up_result_that_liars_agree_on_stops_no_round() -> None:
    honest, said = withheld_results(lambda value: digest("made up", value))
    assert said
    assert not said & set(head_after(honest[0], 3).parts)
    assert updates_of(honest[0], 3) >= ids(honest)
