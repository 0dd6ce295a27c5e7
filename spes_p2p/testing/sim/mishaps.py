"""Makes the faults of a scenario happen to a swarm, and heals it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.params import quorum
from spes_p2p.testing.sim.byzantine import equivocator
from spes_p2p.testing.sim.peer import Line, SimPeer, unchanged
from spes_p2p.testing.sim.scenario import Scenario

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm

LINGER_MS = 10_000
"""A node serves on this long after a proper leave: others may need its vote."""
NORMAL_RATE_BYTES_PER_S = 10_000_000
"""Twice `min_rate`: a line that keeps up."""
NORMAL_LINE = Line(latency_ms=(1, 50), rate_bytes_per_s=NORMAL_RATE_BYTES_PER_S)
LONG_SHARE = 0.4
"""Of the seeds with several faults that have a long one among them, how many show it."""
FIRST_MS = 3_000
"""Nothing happens before."""


class Mishaps:
    """What goes wrong, with randomness of its own, so that the network's draws are not disturbed."""

    def __init__(self, swarm: Swarm, scenario: Scenario) -> None:
        self._swarm = swarm
        self._scenario = scenario
        self._random = random.Random(f"mishaps {scenario.seed}")
        self._active = True
        self._names = 0
        self._leaving: set[PeerId] = set()
        self.last_until_ms = 0
        """Long faults are not healed before."""

    @property
    def leaving(self) -> frozenset[PeerId]:
        """Who was told to leave."""
        return frozenset(self._leaving)

    def begin(self) -> None:
        """Before any time passes."""
        for peer in self._swarm.peers.values():
            self._equip(peer)
        for number, kind in self._scenario.byzantine:
            self._corrupt(list(self._swarm.peers.values())[number], kind)
        repeated: dict[str, tuple[int, Callable[[], None]]] = {
            "partition": (25_000, self._partition),
            "oneway": (20_000, self._one_way),
            "flapping": (30_000, self._flap),
            "crash": (5_000, self._crash),
            "freeze": (15_000, self._freeze),
        }
        for name, (mean_ms, action) in repeated.items():
            if name in self._scenario.faults:
                self._every(mean_ms, action)
        self._begin_long()
        if "join" in self._scenario.faults:
            for _ in range(self._random.randint(1, 3)):
                self._once(45_000, self._join)
        if "sybils" in self._scenario.faults:
            for _ in range(self._random.randint(2, 8)):
                self._once(45_000, self._sybil)
        if "leave" in self._scenario.faults and len(self._swarm.peers) > 1:
            self._once(60_000, self._leave)

    def heal(self) -> None:
        """The network is whole again, who was down or stood still runs; liars go on lying."""
        swarm = self._swarm
        self._active = False
        swarm.barriers.clear()
        swarm.log(None, "healed")
        for peer in [*swarm.peers.values(), *swarm.twins.values()]:
            peer.crash_points.clear()
            peer.line = replace(NORMAL_LINE, train_ms=peer.line.train_ms)
            peer.uplink_free_ms = peer.downlink_free_ms = swarm.now_ms
            swarm.thaw(peer)
            if not (peer.alive or peer.left or peer.sybil or peer.gone):
                swarm.restart(peer, peer.capacity)

    def watch(self, head: Head) -> None:
        """A new certificate: if too many of its voters were Byzantine, some keep to the rules from now on."""
        terms = Terms(head)
        liars = [peer for peer in self._swarm.peers.values() if not peer.honest and peer.peer_id in terms.voters]
        for peer in liars[terms.num_faults :]:
            self._reform(peer)

    # --- once, at the beginning --------------------------------------------------------------------------------------

    def _equip(self, peer: SimPeer) -> None:
        """Its line and its clock."""
        faults, source = self._scenario.faults, self._random
        line = replace(NORMAL_LINE, train_ms=source.randint(4_000, 12_000))
        if "loss" in faults:
            line = replace(line, loss=source.uniform(0.0, 0.3))
        if "duplication" in faults:
            line = replace(line, duplication=source.uniform(0.0, 0.3))
        if "reorder" in faults:
            line = replace(line, latency_ms=(1, source.randint(200, 1_500)))
        elif "latency" in faults:
            base = source.randint(50, 400)
            line = replace(line, latency_ms=(base, base + 100))
        if "slow" in faults and source.random() < 0.2:
            line = replace(line, rate_bytes_per_s=source.choice((500_000, 50_000)))
        if "clock" in faults:
            peer.clock_rate = source.uniform(0.95, 1.05)
        peer.line = line

    def _corrupt(self, peer: SimPeer, kind: str) -> None:
        swarm = self._swarm
        swarm.log(peer, f"is Byzantine: {kind}")
        others = [other for other in swarm.peers if other != peer.peer_id]
        half = frozenset(other for other in others if self._random.random() < 0.5)
        peer.byzantine = True
        match kind:
            case "twins":
                swarm.add_twin(peer)
                self._split_twins(peer)
            case "equivocate":
                peer.tampers = equivocator(peer.identity, half)
            case "liars":
                peer.aggregates = lambda value: digest("lie", peer.peer_id, value)
            case _:
                peer.withholds = True

    def _split_twins(self, peer: SimPeer) -> None:
        """Some talk with the one, some with the other; it changes now and then."""
        swarm = self._swarm
        seeing = frozenset(other for other in swarm.peers if self._random.random() < 0.5)
        before = swarm.sees_twin
        key = peer.peer_id

        def sees(other: PeerId, wanted: PeerId) -> bool:
            return other in seeing if wanted == key else before(other, wanted)

        swarm.sees_twin = sees

    def _reform(self, peer: SimPeer) -> None:
        swarm = self._swarm
        swarm.log(peer, "keeps to the rules from now on")
        peer.tampers, peer.aggregates, peer.withholds, peer.byzantine = None, unchanged, False, False
        peer.once_byzantine = True
        twin = swarm.twins.pop(peer.peer_id, None)
        if twin is not None:
            swarm.kill(twin)

    # --- again and again ---------------------------------------------------------------------------------------------

    def _every(self, mean_ms: int, action: Callable[[], None]) -> None:
        def happen() -> None:
            if self._active:
                action()
                self._swarm.at(self._random.randint(mean_ms // 4, 2 * mean_ms), happen)

        self._swarm.at(FIRST_MS + self._random.randint(0, mean_ms), happen)

    def _once(self, latest_ms: int, action: Callable[[], None]) -> None:
        self._swarm.at(self._random.randint(FIRST_MS, latest_ms), lambda: action() if self._active else None)

    def _victim(self) -> SimPeer | None:
        """Somebody honest that runs."""
        peers = [peer for peer in self._swarm.peers.values() if peer.honest and peer.runs and not peer.left]
        return self._random.choice(peers) if peers else None

    def _barrier(self, name: str, blocks: Callable[[PeerId, PeerId], bool], duration_ms: int) -> None:
        swarm = self._swarm
        self._names += 1
        key = f"{name} {self._names}"
        swarm.barriers[key] = blocks
        swarm.at(duration_ms, lambda: swarm.barriers.pop(key, None) and None)

    def _partition(self) -> None:
        swarm = self._swarm
        one = frozenset(peer for peer in swarm.peers if self._random.random() < 0.5)
        duration_ms = self._random.randint(2_000, 40_000)
        swarm.log(None, f"partition for {duration_ms} ms: {self._list(one)} from the others")
        self._barrier("partition", lambda a, b: (a in one) != (b in one), duration_ms)

    def _one_way(self) -> None:
        victim = self._random.choice(list(self._swarm.peers))
        deaf = frozenset(peer for peer in self._swarm.peers if self._random.random() < 0.5)
        duration_ms = self._random.randint(5_000, 60_000)
        self._swarm.log(None, f"for {duration_ms} ms nothing passes from {self._list([victim])} to {self._list(deaf)}")
        self._barrier("oneway", lambda a, b: a == victim and b in deaf, duration_ms)

    def _flap(self) -> None:
        swarm = self._swarm
        victim = self._random.choice(list(swarm.peers))
        period_ms, duration_ms = self._random.randint(300, 3_000), self._random.randint(20_000, 60_000)
        swarm.log(None, f"the lines of {self._list([victim])} flap every {period_ms} ms for {duration_ms} ms")
        self._barrier("flap", lambda a, b: victim in (a, b) and (swarm.now_ms // period_ms) % 2 == 0, duration_ms)

    def _crash(self) -> None:
        victim = self._victim()
        if victim is not None and not victim.crash_points:
            down_ms = self._random.choice((50, 1_000, self._random.randint(1_000, 30_000)))
            self._swarm.crash_at(victim, victim.num_points + self._random.randint(1, 60), down_ms=down_ms)

    def _freeze(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._swarm.freeze(victim)
            self._swarm.at(self._random.randint(500, 40_000), lambda: self._swarm.thaw(victim))

    # --- for long, once or twice -------------------------------------------------------------------------------------

    def _begin_long(self) -> None:
        """Long enough for tentative certificates, in most seeds: they come once patience is over."""
        faults, source = self._scenario.faults, self._random
        for name, action in (("halves", self._halve), ("silent", self._silence)):
            if name in faults and (len(faults) == 1 or source.random() < LONG_SHARE):
                at_ms, duration_ms = source.randint(FIRST_MS, 15_000), source.randint(20_000, 70_000)
                self._swarm.at(at_ms, lambda action=action, duration_ms=duration_ms: action(duration_ms))  # type: ignore[misc]  # loop variables
                self.last_until_ms = max(self.last_until_ms, at_ms + duration_ms)

    def _voters(self) -> list[PeerId]:
        head = max((peer.machine.head for peer in self._swarm.peers.values() if peer.honest), key=lambda h: h.round)
        return [peer for peer in Terms(head).voters if peer in self._swarm.peers]

    def _halve(self, duration_ms: int) -> None:
        """Neither half has a quorum. Sometimes they are mixed anew on the way."""
        swarm, source = self._swarm, self._random
        voters = self._voters()
        one = set(source.sample(voters, len(voters) // 2))
        one |= {peer for peer in swarm.peers if peer not in voters and source.random() < 0.5}
        again = source.random() < 0.2
        part_ms = duration_ms // 2 if again else duration_ms
        swarm.log(None, f"halves for {part_ms} ms: {self._list(frozenset(one))} from the others")
        self._barrier("halves", lambda a, b: (a in one) != (b in one), part_ms)
        if again:
            swarm.at(part_ms, lambda: self._halve(duration_ms - part_ms) if self._active else None)

    def _silence(self, duration_ms: int) -> None:
        """Voters die; in one of four such seeds they never come back."""
        swarm, source, voters = self._swarm, self._random, self._voters()
        most = len(voters) - quorum(len(voters)) + 1
        chosen = [swarm.peers[peer] for peer in voters if swarm.peers[peer].honest and not swarm.peers[peer].left]
        number = min(source.choice((1, most, most)), len(voters) - 1, len(chosen))
        for_good = source.random() < 0.25
        for peer in source.sample(chosen, number):
            swarm.log(peer, "dies for good" if for_good else f"dies for {duration_ms} ms")
            swarm.kill(peer)
            peer.gone = for_good
            if not for_good:
                swarm.at(duration_ms, lambda peer=peer: self._revive(peer))  # type: ignore[misc]  # a loop variable

    def _revive(self, peer: SimPeer) -> None:
        # healing, which may come at this very moment, starts those that are dead for a while
        if self._active:
            self._swarm.restart(peer, peer.capacity)

    # --- the roster --------------------------------------------------------------------------------------------------

    def _newcomer(self, name: str) -> SimPeer:
        swarm = self._swarm
        known = self._random.sample(list(swarm.peers), min(3, len(swarm.peers)))
        peer = swarm.add(name, capacity=self._scenario.capacity, knows=known)
        self._equip(peer)
        peer.clock_rate = 1.0  # its machine has begun with this clock
        return peer

    def _join(self) -> None:
        self._names += 1
        self._newcomer(f"joiner{self._names}")

    def _sybil(self) -> None:
        """It joins; then it trains nothing, or is gone."""
        self._names += 1
        peer = self._newcomer(f"sybil{self._names}")
        peer.sybil = peer.hangs = True
        if self._random.random() < 0.7:
            self._swarm.at(self._random.randint(1_000, 40_000), lambda: self._swarm.kill(peer))

    def _leave(self) -> None:
        victim = self._victim()
        if victim is None or not victim.machine.is_member:
            return
        swarm = self._swarm
        self._leaving.add(victim.peer_id)
        handover = self._random.choice((None, Digest(digest("handover", victim.peer_id))))
        swarm.log(victim, "wants to leave")
        swarm.give(victim, fx.LeaveWanted(handover=handover, handover_bytes=1_000))
        self._await_left(victim)

    def _await_left(self, peer: SimPeer) -> None:
        """End its process some time after it has left."""

        def look() -> None:
            if peer.left:
                self._swarm.at(LINGER_MS, lambda: self._swarm.kill(peer))
            else:
                self._swarm.at(1_000, look)

        look()

    def _list(self, peers: frozenset[PeerId] | list[PeerId]) -> str:
        return " ".join(peer.name for key, peer in self._swarm.peers.items() if key in peers) or "nobody"
