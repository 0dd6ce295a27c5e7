"""Round machines over virtual time: the very machines of the node, with work that costs time and no tensors.

Deterministic for a seed. Messages take a random latency, may be lost, doubled or kept from passing; blobs are names
with holders, and take time by size and line; disks lose what was not synced. It serves the tests of the protocol core
and `spes-p2p simulate`; the network, the store and the trainer are real elsewhere. Its parts are in `testing/sim/`.

What must hold is checked as it happens (`sim/invariants.py`): an `InvariantError` names the seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import RunManifest
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.state import RosterRow, State
from spes_p2p.testing.signing import FastSigner, verify_fast
from spes_p2p.testing.sim.blobs import Blobs, state_blobs
from spes_p2p.testing.sim.clockwork import Clockwork
from spes_p2p.testing.sim.disk import Point, entries_of, torn, written_first
from spes_p2p.testing.sim.invariants import InvariantError, Monitor
from spes_p2p.testing.sim.peer import Line, SimPeer
from spes_p2p.testing.sim.shared import deriving
from spes_p2p.testing.sim.trace import Trace
from spes_p2p.testing.sim.work import Work

__all__ = ["InvariantError", "Line", "SimPeer", "Swarm", "identity_of", "make_manifest", "verify_either"]


@functools.lru_cache(maxsize=4096)
def identity_of(name: str) -> Identity:
    """A key that depends on the name alone."""
    return Identity.from_seed(digest("testing key", name.encode()))


def verify_either(peer: PeerId, tag: str, payload: bytes, signature: bytes) -> bool:
    """Whether a signature is a `FastSigner`'s or a real one: tests may sign by hand with `identity_of`."""
    return verify_fast(peer, tag, payload, signature) or verify(peer, tag, payload, signature)


def make_manifest(config: RunConfig, founders: list[PeerId], num_parts: int, invite: Identity) -> RunManifest:
    """A run manifest with made-up genesis blobs."""
    return RunManifest(
        1,
        config.to_json(),
        founders[0],
        tuple(sorted(founders)),
        invite.peer_id,
        founders[0],
        tuple(digest("part", part) for part in range(num_parts)),
        tuple(digest("shard", shard) for shard in range(config.num_shards)),
        digest("held out"),
        1,
    )


class Swarm(Clockwork):
    """A simulated swarm. `founders`: names; `members`: names of more that are in the roster from the beginning;
    `has_key`: the first founder holds the run's recovery key.

    Time and what is due are `Clockwork`'s.
    """

    def __init__(
        self,
        config: RunConfig,
        founders: list[str],
        *,
        seed: int,
        num_parts: int = 4,
        members: tuple[str, ...] = (),
        has_key: bool = False,
    ) -> None:
        super().__init__(seed)
        self.config = config
        self.peers: dict[PeerId, SimPeer] = {}
        self.twins: dict[PeerId, SimPeer] = {}
        """Second processes with the same key."""
        self.sees_twin: Callable[[PeerId, PeerId], bool] = lambda other, key: False
        """(peer, key) -> whether it talks with the second process of that key, not the first."""
        self.invite = FastSigner(identity_of("invite").peer_id)
        self.key_holders: set[PeerId] = set()
        """Who holds the run's recovery key, from its next start on: it is the first founder's."""
        if has_key:
            self.key_holders.add(identity_of(founders[0]).peer_id)
        self.verifier = verify_either
        self.blocked: Callable[[PeerId, PeerId], bool] = lambda sender, receiver: False
        self.barriers: dict[str, Callable[[PeerId, PeerId], bool]] = {}
        """More reasons for which (sender, receiver) cannot pass, by name."""
        self.route: Callable[[SimPeer, fx.Send], PeerId | None] = lambda sender, send: send.to
        """The key in `peers` of who gets a message; None: it is lost. For twins, and schedules that look inside."""
        self.problems: list[str] = []
        """Messages that a machine refused."""
        self.messages = 0
        self.bytes_sent = 0
        self.derive = deriving(len(founders) + len(members))
        """What the machines share."""
        self.log_lines = Trace(self)
        self.monitor = Monitor(self)
        self.blobs = Blobs(self)
        self.work = Work(self)
        self.crashed: Callable[[SimPeer, Point], None] = lambda peer, point: None
        """Called after a crash at a journal point."""
        self.passes: Callable[[SimPeer, Point], None] = lambda peer, point: None
        """Called at every journal point; its number is `peer.num_points`."""
        sizes = PieceSizes(
            expert_blob_bytes=100_000,
            psi_piece_bytes=10_000,
            part_result_bytes=40_000,
            num_parts=num_parts,
            num_shards=config.num_shards,
        )
        ids = [identity_of(name).peer_id for name in founders]
        self.genesis = genesis_head(make_manifest(config, ids, num_parts, identity_of("invite")), sizes)
        self.genesis = _with_members(self.genesis, members)
        for name in (*founders, *members):
            self.add(name)

    # --- peers -------------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        capacity: int = 2,
        line: Line | None = None,
        knows: list[PeerId] | None = None,
        clock_rate: float = 1.0,
    ) -> SimPeer:
        """A peer enters with the genesis head."""
        peer = self._make(name, capacity, line or Line(), clock_rate)
        self.peers[peer.peer_id] = peer
        self._enter(peer)
        if knows:
            self.later(peer, 0, fx.PeersKnown(peers=tuple(knows)))
        return peer

    def add_twin(self, peer: SimPeer) -> SimPeer:
        """A second process with the key of a peer, and a disk of its own; `sees_twin` says who talks with which."""
        twin = self._make(peer.name, peer.capacity, peer.line, peer.clock_rate)
        peer.byzantine = twin.byzantine = True
        self.twins[peer.peer_id] = twin
        self._enter(twin)
        return twin

    def _make(self, name: str, capacity: int, line: Line, clock_rate: float) -> SimPeer:
        signer = FastSigner(identity_of(name).peer_id)
        machine = self._machine(signer, self.genesis, capacity, {}, int(self.now_ms * clock_rate))
        peer = SimPeer(name, signer, machine, line, capacity=capacity, clock_rate=clock_rate)
        peer.blobs |= set(state_blobs(self.genesis))
        peer.heads.append(self.genesis)
        return peer

    def _enter(self, peer: SimPeer) -> None:
        self.after(peer, 0, lambda: self.run_batch(peer, peer.machine.start(peer.local_ms(self.now_ms))))
        self.later(peer, 0, fx.StateReady(round=1))

    def _machine(
        self,
        signer: FastSigner,
        head: Head,
        capacity: int,
        journal: dict[str, bytes],
        now_ms: int,
        stop: int | None = None,
    ) -> RoundMachine:
        payload = invite_payload(self.genesis.run.run_id, signer.peer_id)
        wishes = Wishes(
            capacity=capacity,
            private_seed=digest("private", signer.peer_id),
            invite_signature=self.invite.sign("invite", payload),
            stop_after_round=stop,
            recovery=signer if signer.peer_id in self.key_holders else None,
        )
        return RoundMachine(head, signer, self.verifier, wishes, now_ms=now_ms, journal=journal, derive=self.derive)

    def named(self, name: str) -> SimPeer:
        """The peer of that name."""
        return self.peers[identity_of(name).peer_id]

    def instances(self, peer: PeerId) -> Iterator[SimPeer]:
        """The process of a key, and its twin if there is one."""
        if peer in self.peers:
            yield self.peers[peer]
        if peer in self.twins:
            yield self.twins[peer]

    def process_for(self, other: PeerId, key: PeerId) -> SimPeer | None:
        """The process that a peer talks with when it names a key."""
        if key in self.twins and self.sees_twin(other, key):
            return self.twins[key]
        return self.peers.get(key)

    # --- life and death ----------------------------------------------------------------------------------------------

    def kill(self, peer: SimPeer) -> None:
        """SIGKILL: everything in memory is gone, the disk stays."""
        peer.alive = peer.frozen = False
        peer.life += 1
        peer.training = peer.timer_ms = None
        peer.waiting.clear()
        peer.fetching.clear()
        peer.uplink_free_ms = peer.downlink_free_ms = self.now_ms
        self.log(peer, "is killed")

    def restart(self, peer: SimPeer, capacity: int | None = None, *, stop_after_round: int | None = None) -> None:
        """Start again from the disk."""
        if peer.alive:
            self.kill(peer)
        peer.alive = True
        peer.life += 1
        peer.capacity = 2 if capacity is None else capacity
        head, now_ms = peer.heads[-1], peer.local_ms(self.now_ms)
        signer = FastSigner(peer.peer_id)
        peer.machine = self._machine(signer, head, peer.capacity, dict(peer.journal), now_ms, stop_after_round)
        self.log(peer, f"starts again in round {head.round + 1}")
        self.monitor.restarted(peer)
        self.run_batch(peer, peer.machine.start(now_ms))
        life = peer.life
        self.at(peer.line.work_ms, lambda: self.work.load(peer, head) if peer.life == life else None)

    def crash_at(self, peer: SimPeer, point: int, *, down_ms: int | None = None) -> None:
        """Crash when a peer comes to its journal point of that number (from 1; `peer.num_points` are behind it)."""
        peer.crash_points[point] = down_ms

    def freeze(self, peer: SimPeer) -> None:
        """SIGSTOP."""
        if peer.alive and not peer.frozen:
            peer.frozen = True
            self.log(peer, "is frozen")

    def thaw(self, peer: SimPeer) -> None:
        """SIGCONT: everything that waited comes at once."""
        if not peer.frozen:
            return
        peer.frozen = False
        self.log(peer, "is thawed")
        waiting, life = list(peer.waiting), peer.life
        peer.waiting.clear()
        for action in waiting:
            if peer.life == life:
                action()

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> str:
        """Hash of everything that was sent and adopted, with its time."""
        return self.monitor.trace_hash.hex()

    def log(self, peer: SimPeer | None, text: str) -> None:
        """Something for the readable trace."""
        self.log_lines.add(peer, text)

    # --- time --------------------------------------------------------------------------------------------------------

    def later(self, peer: SimPeer, delay_ms: int, event: fx.Input) -> None:
        """Give a peer an input later, if it is still the same process."""
        self.after(peer, delay_ms, lambda: self.give(peer, event))

    def after(self, peer: SimPeer, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something for a peer later, if it is still the same process; a frozen one does it when thawed."""
        life = peer.life

        def due() -> None:
            if peer.life == life:
                self.when_thawed(peer, action)

        self.at(delay_ms, due)

    def when_thawed(self, peer: SimPeer, action: Callable[[], None]) -> None:
        """Do something for a peer now, or as soon as it runs again."""
        if peer.frozen:
            peer.waiting.append(action)
        elif peer.alive:
            action()

    def run_to_round(self, number: int, limit_ms: int, peers: list[SimPeer] | None = None) -> bool:
        """Until these peers (default: all that live) have adopted that round."""
        last: SimPeer | None = None

        def lacks(peer: SimPeer) -> bool:
            return peer.machine.head.round < number and (peers is not None or (peer.alive and not peer.left))

        def there() -> bool:
            nonlocal last
            if last is None or not lacks(last):  # asked after every action: whoever lacked it mostly lacks it still
                chosen = self.peers.values() if peers is None else peers
                last = next((peer for peer in chosen if lacks(peer)), None)
            return last is None

        return self.run(there, limit_ms)

    # --- the shell of one machine ------------------------------------------------------------------------------------

    def give(self, peer: SimPeer, event: fx.Input) -> None:
        """One input for one machine."""
        if not peer.alive:
            return
        if peer.frozen:
            peer.waiting.append(lambda: self.give(peer, event))
            return
        now_ms = peer.local_ms(self.now_ms)
        self.monitor.before(peer)
        try:
            effects = peer.machine.handle(event, now_ms)
        except RemoteProtocolError as error:
            self.problems.append(f"{self.now_ms} {peer.name}: {error.reason}")
            self.log(peer, f"refuses: {error.reason}")
            event = fx.Tick()
            effects = peer.machine.handle(event, now_ms)
        due = peer.machine.deadline_ms()
        if isinstance(event, fx.Tick) and due is not None and due <= now_ms:
            raise self.monitor.broken(f"{peer.name} wants to be called again at once, for ever")
        self.run_batch(peer, effects)

    def run_batch(self, peer: SimPeer, effects: list[fx.Effect]) -> None:
        """Execute the effects of one input as `sim/disk.py` says; a crash on the way ends it."""
        life, entries = peer.life, entries_of(effects)
        if entries:
            if not written_first(effects):
                raise self.monitor.broken(f"S2: {peer.name} sends before it has journalled what it sends")
            if self._crashes(peer, Point.BEFORE_WRITE):
                return
            if self._crashes(peer, Point.UNSYNCED):
                peer.journal.update(torn(entries, self.random))
                return
            peer.journal.update(entries)
            if self._crashes(peer, Point.SYNCED):
                return
        for effect in effects:
            if isinstance(effect, fx.Adopt) and self._crashes(peer, Point.BEFORE_ADOPT):
                return
            self._execute(peer, effect)
            if peer.life != life:
                return
            if isinstance(effect, fx.Send) and self._crashes(peer, Point.SENT):
                return
            if isinstance(effect, fx.Adopt) and self._crashes(peer, Point.ADOPTED):
                return
        self._set_timer(peer)

    def _crashes(self, peer: SimPeer, point: Point) -> bool:
        peer.num_points += 1
        self.passes(peer, point)
        if peer.num_points not in peer.crash_points:
            return False
        down_ms = peer.crash_points.pop(peer.num_points)
        self.log(peer, f"crashes at journal point {peer.num_points}: {point.value}")
        self.kill(peer)
        self.crashed(peer, point)
        if down_ms is not None:
            life = peer.life
            self.at(down_ms, lambda: self.restart(peer, peer.capacity) if peer.life == life else None)
        return True

    def _set_timer(self, peer: SimPeer) -> None:
        due = peer.machine.deadline_ms()
        if due is None:
            return
        due = peer.global_ms(due)
        if peer.timer_ms is not None and self.now_ms < peer.timer_ms <= due:
            return
        peer.timer_ms = max(due, self.now_ms + 1)
        life, at = peer.life, peer.timer_ms

        def ring() -> None:
            if peer.life == life and peer.timer_ms == at:
                peer.timer_ms = None
                self.give(peer, fx.Tick())

        self.at(peer.timer_ms - self.now_ms, ring)

    def _execute(self, peer: SimPeer, effect: fx.Effect) -> None:
        match effect:
            case fx.Persist():
                pass  # all of a batch are durable by now
            case fx.Send():
                self._send(peer, effect)
            case fx.Adopt():
                self.monitor.adopted(peer, effect.head, effect.certificate)
                self.work.adopt(peer, effect)
            case fx.GoBack():
                self.work.go_back(peer, effect)
            case fx.Serve():
                self._serve(peer, effect)
            case fx.Left():
                self.log(peer, "has left")
                peer.left = True
            case _:
                self.work.execute(peer, effect)

    # --- the network -------------------------------------------------------------------------------------------------

    def is_blocked(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether nothing passes from one to the other."""
        return self.blocked(sender, receiver) or any(cut(sender, receiver) for cut in self.barriers.values())

    def _send(self, peer: SimPeer, send: fx.Send) -> None:
        self.messages += 1
        self.bytes_sent += len(send.data)
        peer.messages_sent += 1
        peer.bytes_sent += len(send.data)
        data: bytes | None = send.data
        if peer.tampers is not None:
            data = peer.tampers(send)
        self.monitor.sent(peer, send)
        if data is not None:
            self._deliver(peer, fx.Send(ticket=send.ticket, to=send.to, data=data))

    def _deliver(self, peer: SimPeer, send: fx.Send) -> None:
        line = peer.line
        low, high = line.latency_ms
        delay = self.random.randint(low, high) + line.bytes_ms(len(send.data))
        lost = self.random.random() < line.loss
        key = self.route(peer, send)
        if line.duplication and key is not None and self.random.random() < line.duplication:
            self._carry(peer, send, key, delay + self.random.randint(low, high))
        lost = lost or key not in self.peers or self.is_blocked(peer.peer_id, send.to)
        self.log_lines.sent(peer, send, lost=lost)
        if key is not None and not lost:
            self._carry(peer, send, key, delay)

    def _carry(self, peer: SimPeer, send: fx.Send, key: PeerId, delay_ms: int) -> None:
        """A message on its way: it arrives once the receiver runs, and only then is it confirmed."""
        life = peer.life
        target = self.process_for(peer.peer_id, send.to) if key == send.to else self.peers.get(key)
        if target is None:
            return

        def arrive() -> None:
            self.give(target, fx.Received(sender=peer.peer_id, data=send.data))
            if peer.life == life:
                self.later(peer, delay_ms, fx.Delivered(ticket=send.ticket))

        self.at(delay_ms + target.line.bytes_ms(len(send.data)), lambda: self.when_thawed(target, arrive))

    def _serve(self, peer: SimPeer, effect: fx.Serve) -> None:
        for certificate in peer.certificates:
            if certificate.body.round == effect.round:
                self._send(peer, fx.Send(ticket=0, to=effect.to, data=encode(certificate)))


def _with_members(head: Head, names: tuple[str, ...]) -> Head:
    """A genesis head whose roster has more members than a manifest may list founders."""
    more = [RosterRow(identity_of(name).peer_id, 0, 0, 0, 0, None) for name in names]
    roster = tuple(sorted((*head.state.roster, *more), key=lambda row: row.peer))
    return dataclasses.replace(head, state=State(roster, head.state.leases, head.state.shards))
