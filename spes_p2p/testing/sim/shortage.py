"""What a run does with too few voters for a final certificate (docs/protocol.md, section 9).

    1 to 3 voters   tentative certificates go on, the first within patience and a round's bound
    4 or more       at most `max_tentative` of them, by a side of more than f voters; then all say that they wait
    recovery        a node that holds the key begins a new epoch by itself after 10 minutes, unless told not to

Judged only while all voters that run keep to the rules: a liar that is heard may hide the shortage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.params import MIN_BYZANTINE_VOTERS, RECOVERY_MS
from spes_p2p.testing.sim.peer import SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm

_TENTATIVE_ROUNDS = 2
"""With 3 voters or fewer, so many more are waited for."""


def voters_running(swarm: Swarm, terms: Terms) -> list[SimPeer]:
    """Voters whose processes run, liars among them."""
    return [peer for peer in swarm.peers.values() if peer.runs and not peer.left and peer.peer_id in terms.all_voters]


class Shortage:
    """Judges a swarm without a quorum. `bound_ms`: of the open round."""

    def __init__(self, swarm: Swarm, bound_ms: Callable[[], int]) -> None:
        self._swarm = swarm
        self._bound_ms = bound_ms
        self.recovered = False
        """Whether a new epoch has begun, so that final certificates are expected again."""

    def judge(self) -> list[str]:
        """Let it do what it can; what did not happen in time."""
        running = voters_running(self._swarm, Terms(self._top()))
        if not running or not all(peer.honest for peer in running):
            return []
        few = len(self._top().state.voters) < MIN_BYZANTINE_VOTERS
        problems = self._go_on() if few else self._wait(running)
        if not problems and any(self._rescues(peer) for peer in running):
            problems = self._recover()
        return problems

    def _top(self) -> Head:
        heads = [peer.machine.head for peer in self._swarm.peers.values() if peer.honest]
        return max(heads, key=lambda head: (head.epoch, head.round))

    def _go_on(self) -> list[str]:
        swarm, start, patience_ms = self._swarm, self._top().round, self._swarm.config.protocol.patience_ms
        for number in range(start + 1, start + 1 + _TENTATIVE_ROUNDS):
            bound_ms = self._bound_ms() + (2 * patience_ms if number == start + 1 else 0)
            if not swarm.run(lambda number=number: self._top().round >= number, bound_ms):  # type: ignore[misc]  # a loop variable
                return [f"round {number} did not end, not even tentatively, within {bound_ms} ms"]
        return []

    def _wait(self, running: list[SimPeer]) -> list[str]:
        swarm, protocol = self._swarm, self._swarm.config.protocol

        def silent() -> list[str]:
            return [peer.name for peer in running if not self._says_so(peer)]

        most_ms = 2 * protocol.patience_ms + sum(self._bound_ms() for _ in range(protocol.max_tentative + 1))
        if swarm.run(lambda: not silent(), most_ms):
            return []
        return [f"{', '.join(silent())} cannot go on and does not say so within {most_ms} ms"]

    def _says_so(self, peer: SimPeer) -> bool:
        return peer.machine.progress(peer.local_ms(self._swarm.now_ms)).waiting != ""

    def _rescues(self, peer: SimPeer) -> bool:
        return peer.peer_id in self._swarm.key_holders and self._swarm.config.protocol.recovers_by_itself

    def _recover(self) -> list[str]:
        swarm, epoch = self._swarm, self._top().epoch
        limit_ms = int(1.1 * RECOVERY_MS) + self._bound_ms()
        self.recovered = swarm.run(lambda: self._top().epoch > epoch, limit_ms)
        return [] if self.recovered else [f"the holder of the key has begun no new epoch within {limit_ms} ms"]
