"""Drawn scenarios: all faults together, no faults, crashes at every journal point, healing and its judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.sim.campaign import Campaign, play_seed
from spes_p2p.testing.sim.disk import Point
from spes_p2p.testing.sim.faults import parse_faults
from spes_p2p.testing.sim.invariants import InvariantError
from spes_p2p.testing.sim.judge import Judge
from spes_p2p.testing.sim.mishaps import Mishaps
from spes_p2p.testing.sim.scenario import draw
from spes_p2p.testing.swarm import SimPeer, Swarm

Make = Callable[..., Swarm]
MINUTE_MS = 60_000
NUM_MIXED = 60
MOST_PEERS = 13
"""The first seeds have 1 to so many peers; those of the others are drawn."""
NUM_POINTS = 60


def campaign(faults: str, *, num_peers: int | None = None, num_rounds: int = 5, **more: object) -> Campaign:
    chosen = parse_faults(faults)
    return Campaign(
        **{"first_seed": 0, "num_seeds": 1, **more}, num_peers=num_peers, num_rounds=num_rounds, faults=chosen
    )


@pytest.mark.parametrize("seed", range(NUM_MIXED))
def test_nothing_forks_and_nothing_stops_under_mixed_faults(seed: int) -> None:
    mixed = campaign("all", num_peers=seed + 1 if seed < MOST_PEERS else None)
    outcome = play_seed(mixed, seed)
    assert (outcome.violations, outcome.stuck) == ((), ()), mixed.again(seed)
    assert outcome.waits or outcome.rounds_final >= 4


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 7, 10, 13])
def test_without_faults_every_round_is_decided_in_view_0(num_peers: int) -> None:
    outcome = play_seed(campaign("none", num_peers=num_peers), 1)
    assert outcome.views == (0,) * 5
    assert (outcome.violations, outcome.stuck) == ((), ())


def test_members_beyond_the_founders_are_in_the_roster_from_the_beginning_and_vote_once_they_qualify() -> None:
    swarm = Swarm(quick_config(), ["p0", "p1", "p2", "p3"], seed=1, members=("m0", "m1"))
    assert len(swarm.genesis.state.members) == 6
    assert len(swarm.genesis.state.voters) == 4
    assert swarm.run_to_round(4, MINUTE_MS)
    assert len(swarm.named("m0").machine.terms.voters) == 6


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", range(1, NUM_POINTS + 1))
def test_a_crash_at_a_journal_point_costs_neither_promises_nor_rounds(swarm_of: Make, point: int) -> None:
    swarm = swarm_of(4, seed=point)
    victim = swarm.named("p0")
    crashed: list[Point] = []
    swarm.crashed = lambda peer, where: crashed.append(where)
    swarm.crash_at(victim, point, down_ms=1_000)
    assert swarm.run_to_round(3, 5 * MINUTE_MS)
    assert len(crashed) == 1
    assert victim.machine.is_member


@pytest.mark.parametrize("kind", Point)
def test_a_peer_survives_its_last_crash_of_every_kind_in_a_round(swarm_of: Make, kind: Point) -> None:
    passed: dict[Point, int] = {}

    def note(peer: SimPeer, where: Point) -> None:
        if peer.name == "p0" and peer.machine.head.round >= 2:
            passed[where] = peer.num_points

    plain = swarm_of(4, seed=1)
    plain.passes = note
    assert plain.run_to_round(3, 5 * MINUTE_MS)
    swarm, crashed = swarm_of(4, seed=1), []
    swarm.crashed = lambda peer, where: crashed.append((where, peer.machine.head.round - peer.heads[-1].round))
    swarm.crash_at(swarm.named("p0"), passed[kind], down_ms=1_000)
    assert swarm.run_to_round(5, 5 * MINUTE_MS)
    ((where, rounds_lost),) = crashed
    assert where is kind
    assert rounds_lost in ((1,) if kind is Point.BEFORE_ADOPT else (0, 1))
    assert swarm.named("p0").machine.is_member


@pytest.mark.parametrize("forgets", [False, True])
def test_only_a_peer_that_forgets_its_journal_contradicts_itself(swarm_of: Make, forgets: bool) -> None:
    swarm = swarm_of(4)
    victim = swarm.named("p0")
    assert swarm.run(lambda: any("signed/manifest/2" in key for key in victim.journal), MINUTE_MS)
    swarm.kill(victim)
    if forgets:
        victim.journal.clear()
    swarm.barriers["deaf"] = lambda sender, receiver: receiver == victim.peer_id
    swarm.restart(victim)
    if forgets:
        with pytest.raises(InvariantError, match="S2: p0 signed two values"):
            swarm.pass_time(MINUTE_MS)
    else:
        swarm.pass_time(MINUTE_MS)
        assert victim.machine.head.round == 1


# --- mishaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_healing_starts_everybody_who_is_dead_for_a_while_whenever_it_comes(seed: int) -> None:
    scenario = draw(seed, num_peers=8, num_rounds=5, chosen=frozenset({"silent"}))
    swarm = Swarm(scenario.config, [f"p{number}" for number in range(8)], seed=seed)
    swarm.log_lines.on = True
    mishaps = Mishaps(swarm, scenario)
    mishaps.begin()
    assert swarm.run(lambda: not all(peer.alive for peer in swarm.peers.values()), MINUTE_MS)
    for_good = [peer.name for peer in swarm.peers.values() if peer.gone]
    mishaps.heal()
    assert [peer.name for peer in swarm.peers.values() if not peer.alive] == for_good
    assert len(for_good) == sum("dies for good" in line for line in swarm.log_lines.lines())


# --- the judge -------------------------------------------------------------------------------------------------------


def test_a_swarm_that_cannot_talk_is_stuck(swarm_of: Make) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, MINUTE_MS)
    swarm.blocked = lambda sender, receiver: True
    (stuck,) = Judge(swarm, frozenset()).judge()
    assert stuck.startswith("nothing final after round 2 within")


def test_fewer_than_a_quorum_wait_on_purpose_and_say_so(swarm_of: Make) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, MINUTE_MS)
    for name in ("p0", "p1"):
        swarm.kill(swarm.named(name))
    judge = Judge(swarm, frozenset())
    assert (judge.judge(), judge.waits) == ([], True)
    waiting = {swarm.named(name).machine.progress(swarm.now_ms).waiting for name in ("p2", "p3")}
    assert waiting == {"2 of 4 voters heard, 3 needed"}
    assert swarm.named("p2").machine.head.num_tentative == 3


@pytest.mark.parametrize("num_peers", [2, 3])
def test_few_voters_go_on_without_a_dead_one_and_the_holder_of_the_key_ends_it(num_peers: int) -> None:
    names = [f"p{number}" for number in range(num_peers)]
    swarm = Swarm(quick_config(), names, seed=1, has_key=True)
    assert swarm.run_to_round(2, MINUTE_MS)
    swarm.kill(swarm.named(names[-1]))
    judge = Judge(swarm, frozenset())
    assert (judge.judge(), judge.waits) == ([], True)
    head = swarm.named("p0").machine.head
    assert (head.epoch, len(head.state.voters)) == (1, num_peers - 1)
    assert any(not head.is_final for head in swarm.named("p0").heads)
    assert head.is_final


def test_one_that_stays_behind_is_stuck(swarm_of: Make) -> None:
    swarm = swarm_of(4)
    assert swarm.run_to_round(2, MINUTE_MS)
    lost = swarm.named("p3").peer_id
    swarm.blocked = lambda sender, receiver: lost in (sender, receiver)
    (stuck,) = Judge(swarm, frozenset()).judge()
    assert stuck.startswith("two rounds after healing p3 are not there")
