"""Liveness after healing (docs/protocol.md, section 10): three rounds are played, each within its bound.

    a round      training, then three times the transfer budget and the time-outs of the open view and f more, 4 delays
    one tip      who runs has adopted the second round within one more bound
    vacant       no shard is without an owner for three rounds while a member has room
    receipted    an update whose receipt its author held is in one of the two certificates from then on, unless a newer
                 one of the same peer is
    silence      nobody that runs is put out for silence in the third round

With fewer than q honest voters running, the run waits on purpose: nothing is judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.testing.sim import rules
from spes_p2p.testing.sim.peer import SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm

JUDGED_ROUNDS = 3
_CLOCK_ERROR = 1.1
_LONGEST_PAUSE = 4
"""Resends wait up to this many `resend_ms`."""


class Judge:
    """Judges a swarm that has just been healed. `leaving`: nothing is expected of these."""

    def __init__(self, swarm: Swarm, leaving: frozenset[PeerId]) -> None:
        self._swarm = swarm
        self._leaving = leaving
        self._healed_at_ms = swarm.now_ms
        self.waits = False
        """Fewer than q honest voters run."""

    def judge(self) -> list[str]:
        """Play three rounds; what did not happen in time."""
        base = self._top().round
        for number in range(base + 1, base + 1 + JUDGED_ROUNDS):
            if not self._has_quorum():
                self.waits = True
                return []
            bound_ms = self._bound_ms()
            if not self._swarm.run(lambda number=number: self._top().round >= number, bound_ms):  # type: ignore[misc]  # a loop variable
                if not self._has_quorum():
                    self.waits = True
                    return []
                return [f"round {number} did not end within {bound_ms} ms after healing, {self._where()}"]
            if number == base + 2 and not self._swarm.run(lambda: not self._behind(base + 2), self._bound_ms()):
                return [f"two rounds after healing {', '.join(self._behind(base + 2))} are not there, {self._where()}"]
        return [*self._vacant(), *self._unserved(), *self._silenced(base + JUDGED_ROUNDS)]

    # --- who and where -----------------------------------------------------------------------------------------------

    def _expected(self) -> list[SimPeer]:
        return [
            peer
            for peer in self._swarm.peers.values()
            if peer.honest and peer.runs and not (peer.left or peer.sybil or peer.peer_id in self._leaving)
        ]

    def _top(self) -> Head:
        heads = [peer.machine.head for peer in self._swarm.peers.values() if peer.honest]
        return max(heads, key=lambda head: head.round)

    def _has_quorum(self) -> bool:
        terms = Terms(self._top())
        running = [peer for peer in self._swarm.peers.values() if peer.honest and peer.runs and not peer.left]
        return len([peer for peer in running if peer.peer_id in terms.voters]) >= terms.quorum

    def _behind(self, number: int) -> list[str]:
        return [peer.name for peer in self._expected() if peer.machine.head.round < number]

    def _where(self) -> str:
        return "; ".join(
            f"{peer.name} r{peer.machine.terms.round} v{peer.machine.progress(peer.local_ms(self._swarm.now_ms)).view}"
            for peer in self._swarm.peers.values()
            if peer.alive
        )

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _bound_ms(self) -> int:
        top = self._top()
        terms, protocol = Terms(top), top.run.config.protocol
        now_ms = self._swarm.now_ms
        views = [
            peer.machine.progress(peer.local_ms(now_ms)).view
            for peer in self._swarm.peers.values()
            if peer.honest and peer.alive and peer.machine.head is top
        ]
        first = max(views, default=0)
        budget_ms = terms.transfer_budget_ms
        timeouts_ms = sum(
            budget_ms + protocol.view_timeout(view) for view in range(first, first + terms.num_faults + 1)
        )
        training_ms = protocol.round_max_ms + protocol.train_grace_ms
        delays_ms = 4 * _LONGEST_PAUSE * protocol.resend_ms
        return int(_CLOCK_ERROR * (training_ms + 3 * (budget_ms + timeouts_ms) + delays_ms))

    # --- after three rounds ------------------------------------------------------------------------------------------

    def _chain(self) -> list[Head]:
        """Heads that became known after healing, in order."""
        monitor = self._swarm.monitor
        heads = [h for key, h in monitor.heads.items() if monitor.adopted_at_ms[key] >= self._healed_at_ms]
        return sorted(heads, key=lambda head: head.round)

    def _vacant(self) -> list[str]:
        heads = self._chain()[-JUDGED_ROUNDS:]
        if len(heads) < JUDGED_ROUNDS:
            return []
        willing = [any(rules.has_room(Terms(head), peer) for peer in head.state.members) for head in heads]
        return [
            f"shard {shard} is vacant for {JUDGED_ROUNDS} rounds while a member has room"
            for shard in range(self._swarm.config.num_shards)
            if all(willing) and not any(head.state.owners(shard) for head in heads)
        ]

    def _unserved(self) -> list[str]:
        monitor, heads = self._swarm.monitor, self._chain()
        top = heads[-1].round if heads else 0
        found = []
        for update, (number, at_ms) in monitor.receipted_at.items():
            author, manifest = monitor.manifests[update]
            if at_ms < self._healed_at_ms or number + 1 > top or not self._swarm.peers[author].honest:
                continue
            later = [head for head in heads if number <= head.round <= number + 1]
            if not any(self._served(head, author, update, manifest.round) for head in later):
                found.append(f"the receipted update of {monitor.name(author)} of round {manifest.round} is in no cut")
        return found

    def _served(self, head: Head, author: PeerId, update: Digest, base_round: int) -> bool:
        body = self._swarm.monitor.certificates[head.hash].body
        if any(entry.statement == update for entry in body.entries):
            return True
        row = head.state.row(author)
        return row is None or row.base_round >= base_round

    def _silenced(self, number: int) -> list[str]:
        names = {peer.peer_id: peer.name for peer in self._expected()}
        return [
            f"{names[peer]} runs and is out of the roster as silent"
            for peer, (round_number, why) in self._swarm.monitor.evicted.items()
            if why == "silent" and round_number >= number and peer in names
        ]
