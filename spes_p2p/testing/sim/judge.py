"""Liveness after healing (docs/protocol.md, section 10): three final rounds are played, each within its bound.

    a round      training, then three times the transfer budget and the time-outs of the open view and f more, 4 delays
    one tip      the next final round is at most the second one after healing; who runs has adopted the second final
                 one within one more bound
    late work    an update of a branch that was left, on a certificate that was not, is in one of the three final
                 certificates, if all of them are early enough for it
    vacant       no shard is without an owner for three rounds while a member has room
    receipted    an update whose receipt its author held is in one of the two certificates from then on, unless a newer
                 one of the same peer is
    silence      nobody that runs is put out for silence in the third round

With fewer than q honest voters running (`sim/shortage.py`) the run waits on purpose, after some tentative certificates,
and says so; with 3 voters or fewer it goes on; and the holder of the recovery key ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import base_of
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.sim import rules
from spes_p2p.testing.sim.peer import SimPeer
from spes_p2p.testing.sim.shortage import Shortage, voters_running

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm

JUDGED_ROUNDS = 3
ONE_TIP_ROUNDS = 2
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
        """Play three final rounds; what did not happen in time."""
        healed = self._top()
        finals: list[Head] = []
        while len(finals) < JUDGED_ROUNDS:
            if not self._has_quorum():
                self.waits = True
                short = Shortage(self._swarm, self._bound_ms)
                problems = short.judge()
                if problems or not short.recovered:
                    return problems
                healed, finals = self._top(), []
            before, known = self._newest_final(), len(self._swarm.monitor.finals)
            bound_ms = self._bound_ms() + (0 if finals else self._reunion_ms())
            if not self._swarm.run(lambda before=before, known=known: self._is_later(before, known), bound_ms):  # type: ignore[misc]  # loop variables
                if not self._has_quorum():
                    continue
                return [f"nothing final after round {before.round} within {bound_ms} ms of healing, {self._where()}"]
            finals.append(self._newest_final())
            if len(finals) == 1 and finals[0].round > healed.round + ONE_TIP_ROUNDS:
                return [f"round {finals[0].round} is the first final one; healed in round {healed.round + 1}"]
            number = finals[-1].round
            if len(finals) == 2 and not self._swarm.run(lambda n=number: not self._behind(n), self._bound_ms()):  # type: ignore[misc]  # a loop variable
                return [f"two rounds after healing {', '.join(self._behind(number))} are not there, {self._where()}"]
        return [*self._vacant(), *self._unserved(), *self._late(finals), *self._silenced(finals[-1].round)]

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

    def _newest_final(self) -> Head:
        finals = [peer.machine.head.last_final for peer in self._swarm.peers.values() if peer.honest]
        return max(finals, key=lambda head: head.round)

    def _is_later(self, before: Head, known: int) -> bool:
        """Whether an honest peer has a later final certificate. `known`: those that anybody had then; cheap to ask."""
        return len(self._swarm.monitor.finals) > known and self._newest_final().round > before.round

    def _has_quorum(self) -> bool:
        terms = Terms(self._newest_final())
        return len([peer for peer in voters_running(self._swarm, terms) if peer.honest]) >= terms.quorum

    def _behind(self, number: int) -> list[str]:
        return [peer.name for peer in self._expected() if peer.machine.head.last_final.round < number]

    def _reunion_ms(self) -> int:
        """Until all hear each other again, and a tentative attempt under way has ended."""
        protocol = self._swarm.config.protocol
        return protocol.patience_ms + 2 * _LONGEST_PAUSE * protocol.resend_ms

    def _where(self) -> str:
        return "; ".join(
            f"{peer.name} r{peer.machine.terms.round} f{peer.machine.head.last_final.round} "
            f"v{peer.machine.progress(peer.local_ms(self._swarm.now_ms)).view}"
            + (f" side of {len(peer.machine.terms.side)}" if peer.machine.terms.tentative else "")
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
        """The heads behind the newest final one, tentative ones included, oldest first."""
        monitor, head = self._swarm.monitor, self._newest_final()
        found: list[Head] = []
        while head.hash in monitor.certificates:
            found.append(head)
            base = base_of(monitor.certificates[head.hash].body)
            head = monitor.heads.get(base, self._swarm.genesis)
        return found[::-1]

    def _vacant(self) -> list[str]:
        heads = [head for head in self._chain() if head.is_final][-JUDGED_ROUNDS:]
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
        chain = {head.hash for head in heads}
        found = []
        for update, (number, at_ms) in monitor.receipted_at.items():
            author, manifest = monitor.manifests[update]
            if at_ms < self._healed_at_ms or number + 1 > heads[-1].round or not self._swarm.peers[author].honest:
                continue
            if manifest.epoch < heads[-1].epoch or manifest.prev not in chain:
                continue  # a recovery has passed over it, or it was made on a branch that was left
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

    def _late(self, finals: list[Head]) -> list[str]:
        """Updates of branches that were left and that count on the chain as well."""
        monitor = self._swarm.monitor
        chain = {head.hash for head in self._chain()}
        found = []
        for head in monitor.heads.values():
            if head.is_final or head.hash in chain or head.base is None or head.round < finals[0].round - LATE_ROUNDS:
                continue
            for author, update in rules.authors(head.base, monitor.certificates[head.hash].body, ItemKind.UPDATE):
                manifest = monitor.manifests[update][1]
                early = manifest.round >= finals[-1].round - LATE_ROUNDS and manifest.prev in chain
                expected = author in {peer.peer_id for peer in self._expected()}
                if early and expected and not any(self._served(f, author, update, manifest.round) for f in finals):
                    found.append(f"the update of {monitor.name(author)} of round {manifest.round} did not enter late")
        return found

    def _silenced(self, number: int) -> list[str]:
        names = {peer.peer_id: peer.name for peer in self._expected()}
        return [
            f"{names[peer]} runs and is out of the roster as silent"
            for peer, (round_number, why) in self._swarm.monitor.evicted.items()
            if why == "silent" and round_number >= number and peer in names
        ]
