"""Plays one scenario: faults, healing, judgement; and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spes_p2p.ids import PeerId
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.testing.sim.faults import faults_text
from spes_p2p.testing.sim.invariants import InvariantError
from spes_p2p.testing.sim.judge import JUDGED_ROUNDS, Judge
from spes_p2p.testing.sim.mishaps import Mishaps
from spes_p2p.testing.sim.scenario import MAX_FOUNDERS, Scenario
from spes_p2p.testing.swarm import Swarm

FAULTS_MS = 90_000
"""Longest time with faults, whatever came of it."""
PLAIN_ROUND_MS = 300_000
"""Longest round without faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one seed. Deterministic."""

    seed: int
    num_peers: int
    faults: str
    violations: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    waits: bool = False
    """Fewer than q honest voters were left: the run waits on purpose, or goes on tentatively."""
    rounds_final: int = 0
    views: tuple[int, ...] = ()
    """Of each certificate, by round."""
    round_ms: tuple[int, ...] = ()
    """From one first adoption to the next, from round 2 on."""
    messages: int = 0
    bytes_sent: int = 0
    peer_rounds: int = 0
    """Peers that ran, summed over the rounds: what messages and bytes are divided by."""
    leader_bytes: int = 0
    """Most that a deciding leader sent in its round."""
    virtual_ms: int = 0
    trace: str = ""
    """Hash of everything that was sent and adopted."""

    def to_json(self) -> dict[str, Any]:
        """For a line of a file."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = dict(value)
        for name in ("violations", "stuck", "views", "round_ms"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(slots=True)
class _Tally:
    """Counts per round, as certificates become known."""

    swarm: Swarm
    views: list[int] = field(default_factory=list)
    round_ms: list[int] = field(default_factory=list)
    messages: int = 0
    bytes_sent: int = 0
    peer_rounds: int = 0
    leader_bytes: int = 0
    _began_ms: int = 0
    _sent: dict[PeerId, int] = field(default_factory=dict)

    def count(self, before: Head, head: Head) -> None:
        """The first peer adopts a certificate."""
        swarm = self.swarm
        view = swarm.monitor.certificates[head.hash].view
        self.views.append(view)
        if head.round > 1:
            self.round_ms.append(swarm.now_ms - self._began_ms)
        self._began_ms = swarm.now_ms
        leader = Terms(before).leader(view)
        if leader in swarm.peers:
            sent = swarm.peers[leader].bytes_sent - self._sent.get(leader, 0)
            self.leader_bytes = max(self.leader_bytes, sent)
        self._sent = {key: peer.bytes_sent for key, peer in swarm.peers.items()}
        self.peer_rounds += sum(peer.alive for peer in swarm.peers.values())
        self.messages, self.bytes_sent = swarm.messages, swarm.bytes_sent


def play(
    scenario: Scenario, *, trace: bool = False, told: Callable[[int], None] = lambda number: None
) -> tuple[Outcome, list[str]]:
    """Run a scenario to its end; the lines are the readable trace, if it was asked for. `told` gets each round that
    somebody has a certificate of, for whoever waits."""
    names = [f"p{number}" for number in range(scenario.num_peers)]
    founders, members = names[:MAX_FOUNDERS], tuple(names[MAX_FOUNDERS:])
    swarm = Swarm(
        scenario.config,
        founders,
        seed=scenario.seed,
        num_parts=scenario.config.protocol.parts,
        members=members,
        has_key=scenario.has_key,
    )
    swarm.log_lines.on = trace
    mishaps, tally = Mishaps(swarm, scenario), _Tally(swarm)

    def noticed(before: Head, head: Head) -> None:
        tally.count(before, head)
        mishaps.watch(head)
        told(head.round)

    swarm.monitor.noticed = noticed
    violations: tuple[str, ...] = ()
    stuck: list[str] = []
    waits = False
    try:
        if scenario.faults:
            stuck, waits = _play_faults(swarm, scenario, mishaps)
        else:
            stuck = _play_plain(swarm, scenario)
    except InvariantError as error:
        swarm.log(None, str(error))
        violations = (str(error),)
    outcome = Outcome(
        seed=scenario.seed,
        num_peers=scenario.num_peers,
        faults=faults_text(scenario.faults),
        violations=violations,
        stuck=tuple(stuck),
        waits=waits,
        rounds_final=len(swarm.monitor.finals),
        views=tuple(tally.views),
        round_ms=tuple(tally.round_ms),
        messages=tally.messages,
        bytes_sent=tally.bytes_sent,
        peer_rounds=tally.peer_rounds,
        leader_bytes=tally.leader_bytes,
        virtual_ms=swarm.now_ms,
        trace=swarm.trace,
    )
    return outcome, swarm.log_lines.lines()


def _play_plain(swarm: Swarm, scenario: Scenario) -> list[str]:
    for number in range(1, scenario.num_rounds + 1):
        if not swarm.run_to_round(number, PLAIN_ROUND_MS):
            return [f"round {number} did not end within {PLAIN_ROUND_MS} ms"]
    return []


def _play_faults(swarm: Swarm, scenario: Scenario, mishaps: Mishaps) -> tuple[list[str], bool]:
    mishaps.begin()
    faulty_rounds = max(1, scenario.num_rounds - JUDGED_ROUNDS)

    def enough() -> bool:
        return len(swarm.monitor.finals) >= faulty_rounds and swarm.now_ms >= mishaps.last_until_ms

    swarm.run(enough, FAULTS_MS)
    mishaps.heal()
    judge = Judge(swarm, mishaps.leaving)
    return judge.judge(), judge.waits
