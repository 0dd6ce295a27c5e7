"""Slow, dead and cut-off peers: none stops the others, nobody is evicted wrongly, fast updates are in every round."""

from __future__ import annotations

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.testing.directed import MINUTE_MS, hashes_of, head_after, swarm_in_round, updates_of, view_of
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

TRANSFER_MS = 50
"""Of a usual line."""


def slow_line(factor: int) -> Line:
    """A line on which messages and blobs take so many times longer."""
    return Line(latency_ms=(factor, 20 * factor), transfer_ms=TRANSFER_MS * factor)


def ids(peers: list[SimPeer]) -> set[PeerId]:
    return {peer.peer_id for peer in peers}


def check_fast(fast: list[SimPeer], numbers: range) -> None:
    """The updates of the fast are in each of these rounds, and they agree."""
    for number in numbers:
        assert ids(fast) <= updates_of(fast[0], number), number
    assert len(hashes_of(fast, numbers[-1])) == 1


@pytest.mark.parametrize("num_founders", [4, 7])
@pytest.mark.parametrize("factor", [10, 100])
def test_one_line_that_is_much_too_slow_costs_the_others_nothing(num_founders: int, factor: int) -> None:
    swarm, order = swarm_in_round(3, num_founders)
    slow, fast = order[1], [peer for peer in order if peer is not order[1]]
    slow.line = slow_line(factor)
    begun_ms = swarm.now_ms
    assert swarm.run_to_round(8, 10 * MINUTE_MS, fast)
    check_fast(fast, range(3, 9))
    assert (swarm.now_ms - begun_ms) / 6 < 20_000
    if factor == 10:
        assert slow.peer_id in head_after(fast[0], 8).state.members


@pytest.mark.parametrize("num_founders", [4, 7])
def test_one_dead_and_one_slow_voter_stop_nothing(num_founders: int) -> None:
    swarm, order = swarm_in_round(3, num_founders)
    dead, slow, *fast = order
    swarm.kill(dead)
    slow.line = slow_line(10)
    assert swarm.run_to_round(8, 10 * MINUTE_MS, fast)
    check_fast(fast, range(3, 9))
    assert set(head_after(fast[0], 8).state.members) == ids([slow, *fast])


@pytest.mark.parametrize("num_founders", [4, 7, 10, 13])
def test_f_dead_voters_stop_nothing_and_are_out_after_two_silent_rounds(num_founders: int) -> None:
    swarm, order = swarm_in_round(3, num_founders)
    num_dead = (num_founders - 1) // 3
    dead, alive = order[:num_dead], order[num_dead:]
    for peer in dead:
        swarm.kill(peer)
    assert swarm.run_to_round(5, 10 * MINUTE_MS, alive)
    check_fast(alive, range(3, 6))
    assert view_of(alive[0], 3) <= num_dead
    assert set(head_after(alive[0], 3).state.members) == ids(order)
    assert set(head_after(alive[0], 5).state.voters) == ids(alive)


@pytest.mark.parametrize("num_founders", [4, 7, 10])
def test_f_dead_and_one_cut_off_wait_for_each_other_and_go_on_once_it_is_healed(num_founders: int) -> None:
    swarm, order = swarm_in_round(3, num_founders)
    num_dead = (num_founders - 1) // 3
    dead, lost, rest = order[:num_dead], order[num_dead], order[num_dead + 1 :]
    for peer in dead:
        swarm.kill(peer)
    swarm.blocked = lambda sender, receiver: lost.peer_id in (sender, receiver)
    swarm.run(lambda: False, 3 * MINUTE_MS)
    assert {peer.machine.head.last_final.round for peer in (lost, *rest)} == {2}
    stood = max(peer.machine.head.round for peer in (lost, *rest))
    swarm.blocked = lambda sender, receiver: False
    healed_ms = swarm.now_ms
    assert swarm.run_to_round(stood + 1, 2 * MINUTE_MS, [lost, *rest])
    assert swarm.now_ms - healed_ms < MINUTE_MS
    assert swarm.run_to_round(stood + 4, 5 * MINUTE_MS, [lost, *rest])
    check_fast([lost, *rest], range(stood + 2, stood + 5))
    assert set(head_after(rest[0], stood + 4).state.members) == ids([lost, *rest])


def test_a_broken_line_between_two_of_the_last_three_voters_stops_nothing() -> None:
    """All three are needed, and two of them hear each other's votes through the third only."""
    swarm, order = swarm_in_round(3, 4)
    hub, left, right, dead = order
    swarm.kill(dead)
    swarm.blocked = lambda sender, receiver: {sender, receiver} == {left.peer_id, right.peer_id}
    assert swarm.run_to_round(4, 4 * MINUTE_MS, [hub, left, right])
    assert view_of(hub, 3) == 0
    assert len(hashes_of([hub, left, right], 4)) == 1
    assert set(head_after(hub, 4).state.members) >= ids([hub, left, right])


def test_rounds_end_where_nobody_hears_a_quorum_directly() -> None:
    """Eight voters in a ring, each with lines to four others: five voices where six decide."""
    swarm, order = swarm_in_round(3, 8)
    place = {peer.peer_id: number for number, peer in enumerate(order)}

    def far(sender: PeerId, receiver: PeerId) -> bool:
        steps = abs(place[sender] - place[receiver])
        return min(steps, len(order) - steps) > 2

    swarm.blocked = far
    assert swarm.run_to_round(5, 90_000)
    check_fast(order, range(3, 6))


def slow_joiner(factor: int) -> tuple[Swarm, list[SimPeer], SimPeer]:
    """The swarm in round 6, and somebody who has to load its state over a slow line before it may ask to join."""
    swarm, order = swarm_in_round(6, 4)
    joiner = swarm.add("joiner", knows=[peer.peer_id for peer in order], line=slow_line(factor))
    return swarm, order, joiner


def test_rounds_do_not_wait_for_a_joiner_whose_line_is_too_slow() -> None:
    swarm, order, joiner = slow_joiner(400)
    begun_ms = swarm.now_ms
    assert swarm.run_to_round(12, 10 * MINUTE_MS, order)
    check_fast(order, range(6, 13))
    assert [view_of(order[0], number) for number in range(6, 13)] == [0] * 7
    assert (swarm.now_ms - begun_ms) / 7 < 9_000
    assert not joiner.machine.is_member
    assert joiner.machine.head.round >= 10


def test_a_member_whose_line_has_become_too_slow_costs_a_round_the_grace_and_its_view() -> None:
    swarm, order = swarm_in_round(3, 5)
    slow, fast = order[-1], order[:-1]
    slow.line = slow_line(400)
    begun_ms = swarm.now_ms
    assert swarm.run_to_round(8, 10 * MINUTE_MS, fast)
    check_fast(fast, range(3, 9))
    protocol, budget_ms = swarm.config.protocol, fast[0].machine.terms.transfer_budget_ms
    lost_view_ms = budget_ms + protocol.view_timeout(0)
    assert (swarm.now_ms - begun_ms) / 6 < 9_000 + protocol.train_grace_ms + lost_view_ms


def test_a_joiner_that_is_slow_but_in_time_is_let_in_and_costs_the_others_nothing() -> None:
    swarm, order, joiner = slow_joiner(10)
    assert swarm.run(lambda: joiner.machine.is_member, 2 * MINUTE_MS)
    joined = joiner.machine.head.round
    assert swarm.run_to_round(joined + 4, 5 * MINUTE_MS)
    check_fast(order, range(6, joined + 5))
    assert [view_of(order[0], number) for number in range(6, joined + 5)] == [0] * (joined - 1)
    assert joiner.peer_id in updates_of(order[0], joined + 4)
