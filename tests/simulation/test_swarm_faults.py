from collections.abc import Callable

import pytest

from spes_p2p.digests import digest
from spes_p2p.protocol.codec import bits
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

Make = Callable[..., Swarm]
Peers = Callable[[Swarm], list[SimPeer]]
MINUTE_MS = 60_000


def updates_of(peer: SimPeer) -> list[int]:
    """Updates in each certificate that a peer adopted."""
    return [sum(entry.kind is ItemKind.UPDATE for entry in c.body.entries) for c in peer.certificates]


@pytest.mark.parametrize(("num_founders", "seed"), [(2, 1), (3, 2), (4, 3), (4, 4), (5, 5)])
def test_rounds_go_on_over_lines_that_lose_every_third_message(swarm_of: Make, num_founders: int, seed: int) -> None:
    swarm = swarm_of(num_founders, seed=seed, line=Line(loss=0.33, latency_ms=(5, 300)))
    assert swarm.run_to_round(5, 15 * MINUTE_MS)


@pytest.mark.parametrize("seed", range(3))
def test_a_dead_voter_is_out_after_two_rounds_and_its_shards_are_owned_again(
    swarm_of: Make, peers_of: Peers, seed: int
) -> None:
    swarm = swarm_of(4, seed=seed)
    for peer in peers_of(swarm):
        swarm.restart(peer, capacity=3)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    dead = peers_of(swarm)[seed]
    swarm.kill(dead)
    assert swarm.run_to_round(6, 10 * MINUTE_MS)
    state = peers_of(swarm)[3].machine.head.state
    assert dead.peer_id not in state.members
    assert all(len(row.owners) == 1 for row in state.leases)


@pytest.mark.parametrize("seed", range(4))
def test_killed_and_restarted_peers_sign_nothing_twice_and_come_back(
    swarm_of: Make, peers_of: Peers, seed: int
) -> None:
    swarm = swarm_of(4, seed=seed)
    for _ in range(7):
        swarm.run(lambda: False, swarm.random.randint(1_000, 12_000))
        victim = swarm.random.choice(peers_of(swarm))
        swarm.kill(victim)
        swarm.run(lambda: False, swarm.random.randint(100, 8_000))
        swarm.restart(victim)
    target = max(peer.machine.head.round for peer in peers_of(swarm)) + 3
    assert swarm.run_to_round(target, 10 * MINUTE_MS)
    assert updates_of(peers_of(swarm)[0])[target - 1] == 4


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_swarm_may_lose_power_at_any_moment(swarm_of: Make, peers_of: Peers, seed: int) -> None:
    swarm = swarm_of(4, seed=seed)
    for _ in range(6):
        swarm.run(lambda: False, swarm.random.randint(1_000, 12_000))
        for peer in peers_of(swarm):
            swarm.kill(peer)
        swarm.run(lambda: False, 500)
        for peer in peers_of(swarm):
            swarm.restart(peer)
    target = max(peer.machine.head.round for peer in peers_of(swarm)) + 2
    assert swarm.run_to_round(target, 10 * MINUTE_MS)


def test_nothing_is_trained_twice_for_one_round(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    peer = peers_of(swarm)[0]
    assert swarm.run(lambda: any("signed/manifest/2" in key for key in peer.journal), 5 * MINUTE_MS)
    swarm.kill(peer)
    swarm.restart(peer)
    swarm.run(lambda: peer.training is not None and peer.training[0] == 2, 4_000)
    assert peer.training is None or peer.training[0] != 2
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    assert updates_of(peer)[1] == 4


@pytest.mark.parametrize("seed", range(2))
def test_a_line_that_is_broken_one_way_costs_no_round(swarm_of: Make, peers_of: Peers, seed: int) -> None:
    swarm = swarm_of(4, seed=seed)
    first, second = (peer.peer_id for peer in peers_of(swarm)[:2])
    swarm.blocked = lambda sender, receiver: sender == first and receiver == second
    assert swarm.run_to_round(6, 10 * MINUTE_MS)
    assert updates_of(peers_of(swarm)[2])[1:] == [4] * 5


def test_a_peer_that_was_cut_off_for_rounds_catches_up_and_contributes_again(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    lost, others = peers_of(swarm)[0], peers_of(swarm)[1:]
    swarm.blocked = lambda sender, receiver: lost.peer_id in (sender, receiver)
    assert swarm.run_to_round(6, 10 * MINUTE_MS, others)
    assert lost.machine.head.round <= 3
    swarm.blocked = lambda sender, receiver: False
    target = others[0].machine.head.round + 4
    assert swarm.run_to_round(target, 10 * MINUTE_MS)
    assert lost.machine.is_member
    assert updates_of(others[0])[target - 1] == 4


def test_with_fewer_than_a_quorum_nothing_becomes_final_and_after_healing_it_goes_on(
    swarm_of: Make, peers_of: Peers
) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, 5 * MINUTE_MS)
    halves = {peer.peer_id: place % 2 for place, peer in enumerate(peers_of(swarm))}
    swarm.blocked = lambda sender, receiver: halves[sender] != halves[receiver]
    swarm.run(lambda: False, 5 * MINUTE_MS)
    stood = max(peer.machine.head.last_final.round for peer in peers_of(swarm))
    assert stood <= 3
    swarm.blocked = lambda sender, receiver: False
    assert swarm.run_to_round(stood + 6, 10 * MINUTE_MS)


def test_a_slow_trainer_is_stopped_after_the_grace_and_gives_what_it_has(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    slow = peers_of(swarm)[0]
    slow.line = Line(train_ms=120_000)
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    assert sum(updates_of(peers_of(swarm)[1])) >= 4 * 4 - 1
    assert swarm.now_ms < 5 * 20_000


def test_a_trainer_that_never_answers_does_not_hold_up_the_others(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(3)
    hung = peers_of(swarm)[0]
    hung.hangs = True
    assert swarm.run_to_round(3, 10 * MINUTE_MS)
    assert updates_of(peers_of(swarm)[1])[1:3] == [2, 2]


def test_a_peer_that_loads_slowly_votes_with_the_others_that_hold(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    peers_of(swarm)[0].line = Line(transfer_ms=4_000)
    assert swarm.run_to_round(5, 10 * MINUTE_MS)
    assert all(c.view == 0 for c in peers_of(swarm)[1].certificates)


def test_an_author_that_withholds_its_blobs_is_alive_but_not_in_the_mean(swarm_of: Make, peers_of: Peers) -> None:
    swarm = swarm_of(4)
    peers_of(swarm)[0].withholds = True
    assert swarm.run_to_round(5, 10 * MINUTE_MS)
    assert updates_of(peers_of(swarm)[1])[1:5] == [3] * 4
    assert peers_of(swarm)[0].machine.is_member


def test_refused_pieces_get_no_receipt_and_their_author_is_told(swarm_of: Make, peers_of: Peers) -> None:
    from spes_p2p.protocol.wire import RefusalReason

    swarm = swarm_of(4)
    poisoner = peers_of(swarm)[0]
    poisoner.refuses = RefusalReason.NOT_FINITE
    assert swarm.run_to_round(4, 10 * MINUTE_MS)
    assert updates_of(peers_of(swarm)[1])[1:4] == [3] * 3
    assert any("refused this node's update of round 2: not finite" in text for _, _, text in poisoner.notes)


@pytest.mark.parametrize("num_founders", [4, 7])
def test_a_lying_aggregator_changes_no_part_and_costs_no_part(
    swarm_of: Make, peers_of: Peers, num_founders: int
) -> None:
    swarm = swarm_of(num_founders)
    peers_of(swarm)[0].aggregates = lambda value: digest("lie", value)
    assert swarm.run_to_round(5, 10 * MINUTE_MS)
    bodies = [certificate.body for certificate in peers_of(swarm)[1].certificates[1:5]]
    assert [bits(body.kept, 4) for body in bodies] == [set()] * 4
    honest = peers_of(swarm)[1].blobs
    assert all(part in honest for body in bodies for part in body.parts)
