"""Round machines over virtual time: the very machines of the node, with work that costs time and no tensors.

Deterministic for a seed. Messages take a random latency and may be lost; blobs are names with holders. It serves the
tests of the protocol core; the network, the store and the trainer are real elsewhere.

What must hold is checked as it happens (`InvariantError` names the seed): one body per round, each extends the last, no
honest peer signs two values for one slot, restarts included, and no machine asks to be called again at once.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError, SpesError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import BlobShare, Certificate
from spes_p2p.protocol.codec import decode, encode, pack_float
from spes_p2p.protocol.evidence import conflicting, exclusive_slot
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import CutMessage, Message, Piece, ProposalMessage, RunManifest, Signed
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.wire import PieceKind, RefusalReason


class InvariantError(SpesError):
    """Something happened in a simulated swarm that must never happen."""


def identity_of(name: str) -> Identity:
    """A key that depends on the name alone."""
    return Identity.from_seed(digest("testing key", name.encode()))


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


@dataclass(slots=True, kw_only=True)
class Line:
    """How a peer is connected and how fast it works."""

    latency_ms: tuple[int, int] = (1, 20)
    loss: float = 0.0
    train_ms: int = 8_000
    work_ms: int = 20
    transfer_ms: int = 50


@dataclass(slots=True)
class SimPeer:
    """One peer: its machine, its disk, its line."""

    name: str
    identity: Identity
    machine: RoundMachine
    line: Line
    alive: bool = True
    left: bool = False
    journal: dict[str, bytes] = field(default_factory=dict)
    blobs: set[Digest] = field(default_factory=set)
    certificates: list[Certificate] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    training: tuple[int, int] | None = None
    """(round, begun at)."""
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    timer_ms: int | None = None
    life: int = 0
    aggregates: Callable[[Digest], Digest] = lambda value: value
    """A liar changes the digest."""
    tampers: Callable[[fx.Send], bytes | None] | None = None
    """A liar changes the bytes on their way out, or swallows them (None). Its signatures are not watched."""
    refuses: RefusalReason | None = None
    """What others find when they check this peer's pieces."""
    hangs: bool = False
    """Its trainer never answers."""
    takes_over: bool = True
    """Whether it fetches what leavers hand over."""
    withholds: bool = False
    """Serves no blob."""

    @property
    def peer_id(self) -> PeerId:
        """Raw public key."""
        return self.identity.peer_id


class Swarm:
    """A simulated swarm. `founders`: names."""

    def __init__(self, config: RunConfig, founders: list[str], *, seed: int, num_parts: int = 4) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.now_ms = 0
        self.peers: dict[PeerId, SimPeer] = {}
        self.invite = identity_of("invite")
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.blocked: Callable[[PeerId, PeerId], bool] = lambda sender, receiver: False
        self.route: Callable[[SimPeer, fx.Send], PeerId | None] = lambda sender, send: send.to
        """The key in `peers` of who gets a message; None: it is lost. For schedules that look into messages, and twins."""
        self.problems: list[str] = []
        """Messages that a machine refused."""
        self.messages = 0
        self.seed = seed
        self._bodies: dict[tuple[int, int], Digest] = {}
        self._signed: dict[tuple[PeerId, tuple[str, int, int, int, int]], Signed] = {}
        self._trace = digest("trace")
        sizes = PieceSizes(
            expert_blob_bytes=100_000,
            psi_piece_bytes=10_000,
            part_result_bytes=40_000,
            num_parts=num_parts,
            num_shards=config.num_shards,
        )
        identities = [identity_of(name) for name in founders]
        manifest = make_manifest(config, [i.peer_id for i in identities], num_parts, self.invite)
        self.genesis = genesis_head(manifest, sizes)
        for name in founders:
            self.add(name)

    # --- peers -------------------------------------------------------------------------------------------------------

    def add(
        self, name: str, *, capacity: int = 2, line: Line | None = None, knows: list[PeerId] | None = None
    ) -> SimPeer:
        """A peer enters with the genesis head."""
        identity = identity_of(name)
        peer = SimPeer(name, identity, self._machine(identity, self.genesis, capacity, {}), line or Line())
        peer.blobs |= {*self.genesis.parts, *(s.blob for row in self.genesis.state.shards for s in row.blobs)}
        peer.heads.append(self.genesis)
        self.peers[identity.peer_id] = peer
        self._start(peer)
        self.at(0, lambda: self.give(peer, fx.StateReady(round=1)))
        if knows:
            self.give(peer, fx.PeersKnown(peers=tuple(knows)))
        return peer

    def _machine(
        self,
        identity: Identity,
        head: Head,
        capacity: int,
        journal: dict[str, bytes],
        stop: int | None = None,
    ) -> RoundMachine:
        payload = invite_payload(self.genesis.run.run_id, identity.peer_id)
        wishes = Wishes(
            capacity=capacity,
            private_seed=digest("private", identity.peer_id),
            invite_signature=self.invite.sign("invite", payload),
            stop_after_round=stop,
        )
        return RoundMachine(head, identity, verify, wishes, now_ms=self.now_ms, journal=journal)

    def _start(self, peer: SimPeer) -> None:
        self._run(peer, peer.machine.start(self.now_ms))

    def kill(self, peer: SimPeer) -> None:
        """SIGKILL: everything in memory is gone, the disk stays."""
        peer.alive = False
        peer.life += 1
        peer.training = None

    def restart(self, peer: SimPeer, capacity: int = 2, *, stop_after_round: int | None = None) -> None:
        """Start again from the disk."""
        peer.alive = True
        peer.life += 1
        head = peer.heads[-1]
        peer.training = None
        peer.machine = self._machine(peer.identity, head, capacity, dict(peer.journal), stop_after_round)
        self._start(peer)
        self.later(peer, peer.line.work_ms, fx.StateReady(round=head.round + 1))

    def named(self, name: str) -> SimPeer:
        """The peer of that name."""
        return self.peers[identity_of(name).peer_id]

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def trace(self) -> str:
        """Hash of everything that was sent and adopted, with its time."""
        return self._trace.hex()

    def _broken(self, what: str) -> InvariantError:
        return InvariantError(f"seed {self.seed}, at {self.now_ms} ms: {what}")

    def _check_adoption(self, peer: SimPeer, head: Head, certificate: Certificate) -> None:
        self._trace = digest("trace", self._trace, self.now_ms, peer.peer_id, head.hash)
        first = self._bodies.setdefault((head.epoch, head.round), head.hash)
        if first != head.hash:
            raise self._broken(f"{peer.name} adopted a second body of round {head.round}")
        before = peer.heads[-1]
        if head.round != before.round + 1 or certificate.body.prev != before.hash:
            raise self._broken(f"{peer.name} adopted round {head.round} on top of another chain")

    def _check_signed(self, peer: SimPeer, data: bytes) -> None:
        """No honest peer ever signs two values for one slot."""
        for signed in _signed_in(decode(data)):
            slot = exclusive_slot(signed)
            if slot is None or signed.peer != peer.peer_id:
                continue
            before = self._signed.setdefault((signed.peer, slot), signed)
            if conflicting(before, signed):
                raise self._broken(f"{peer.name} signed two values for {slot}")

    # --- time --------------------------------------------------------------------------------------------------------

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._count, action))

    def later(self, peer: SimPeer, delay_ms: int, event: fx.Input) -> None:
        """Give a peer an input later, if it is still the same process."""
        life = peer.life
        self.at(delay_ms, lambda: self.give(peer, event) if peer.life == life else None)

    def run(self, until: Callable[[], bool], limit_ms: int) -> bool:
        """Let time pass until a condition holds; False if the limit came first."""
        end = self.now_ms + limit_ms
        while not until():
            if not self._heap or self._heap[0][0] > end:
                return False
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
        return True

    def run_to_round(self, number: int, limit_ms: int, peers: list[SimPeer] | None = None) -> bool:
        """Until these peers (default: all that live) have adopted that round."""

        def there() -> bool:
            chosen = peers if peers is not None else [p for p in self.peers.values() if p.alive and not p.left]
            return all(peer.machine.head.round >= number for peer in chosen)

        return self.run(there, limit_ms)

    # --- the shell of one machine ------------------------------------------------------------------------------------

    def give(self, peer: SimPeer, event: fx.Input) -> None:
        """One input for one machine."""
        if not peer.alive:
            return
        try:
            effects = peer.machine.handle(event, self.now_ms)
        except RemoteProtocolError as error:
            self.problems.append(f"{self.now_ms} {peer.name}: {error.reason}")
            event = fx.Tick()
            effects = peer.machine.handle(event, self.now_ms)
        due = peer.machine.deadline_ms()
        if isinstance(event, fx.Tick) and due is not None and due <= self.now_ms:
            raise self._broken(f"{peer.name} wants to be called again at once, for ever")
        self._run(peer, effects)

    def _run(self, peer: SimPeer, effects: list[fx.Effect]) -> None:
        life = peer.life
        for effect in effects:
            if peer.life != life:
                return  # killed between two effects: the rest never happened
            self._execute(peer, effect)
        self._set_timer(peer)

    def _set_timer(self, peer: SimPeer) -> None:
        due = peer.machine.deadline_ms()
        if due is None or (peer.timer_ms is not None and self.now_ms < peer.timer_ms <= due):
            return
        peer.timer_ms = max(due, self.now_ms + 1)
        life, at = peer.life, peer.timer_ms

        def ring() -> None:
            if peer.life == life and peer.timer_ms == at:
                peer.timer_ms = None
                self.give(peer, fx.Tick())

        self.at(peer.timer_ms - self.now_ms, ring)

    def _execute(self, peer: SimPeer, effect: fx.Effect) -> None:
        line = peer.line
        match effect:
            case fx.Persist():
                peer.journal.update(effect.entries)
            case fx.Send():
                self._send(peer, effect)
            case fx.Train():
                peer.training = (effect.round, self.now_ms)
                life = peer.life
                self.at(line.train_ms, lambda: self._trained(peer, effect.round) if peer.life == life else None)
            case fx.StopTraining():
                self._trained(peer, effect.round)
            case fx.CheckPiece():
                reason = self.peers[effect.author].refuses
                event = fx.PieceChecked(manifest=effect.manifest, piece=effect.piece_index, reason=reason)
                if self._transfer(peer, effect.piece.blob, effect.sources):
                    self.later(peer, line.transfer_ms, event)
                else:
                    missing = fx.PieceChecked(
                        manifest=effect.manifest, piece=effect.piece_index, reason=RefusalReason.MISSING
                    )
                    self.later(peer, 10 * line.transfer_ms, missing)
            case fx.FetchBlob():
                if self._transfer(peer, effect.blob, effect.sources):
                    self.later(peer, line.transfer_ms, fx.BlobHeld(blob=effect.blob))
            case fx.Aggregate():
                self._aggregate(peer, effect)
            case fx.RankExperts():
                lists = _lists(effect.shards)
                self.later(peer, line.work_ms, fx.Ranked(cut=effect.cut, merge_lists=lists))
            case fx.CheckRanking():
                problem = None if _lists(effect.shards) == effect.merge_lists else "another ranking"
                self.later(peer, line.work_ms, fx.RankingChecked(body=effect.body, problem=problem))
            case fx.Adopt():
                self._adopt(peer, effect)
            case fx.Serve():
                self._serve(peer, effect)
            case fx.Left():
                peer.left = True
            case fx.Notify():
                peer.notes.append((self.now_ms, effect.level, effect.text))

    def _send(self, peer: SimPeer, send: fx.Send) -> None:
        self.messages += 1
        self._trace = digest("trace", self._trace, self.now_ms, peer.peer_id, send.to, send.data)
        data: bytes | None = send.data
        if peer.tampers is not None:
            data = peer.tampers(send)
        else:
            self._check_signed(peer, send.data)
        if data is not None:
            self._deliver(peer, fx.Send(ticket=send.ticket, to=send.to, data=data))

    def _deliver(self, peer: SimPeer, send: fx.Send) -> None:
        key = self.route(peer, send)
        target = None if key is None else self.peers.get(key)
        low, high = peer.line.latency_ms
        delay = self.random.randint(low, high)
        if target is None or self.random.random() < peer.line.loss or self.blocked(peer.peer_id, send.to):
            return
        life = peer.life

        def arrive() -> None:
            if target.alive:
                self.give(target, fx.Received(sender=peer.peer_id, data=send.data))
                if peer.life == life:
                    self.at(delay, lambda: self.give(peer, fx.Delivered(ticket=send.ticket)))

        self.at(delay, arrive)

    def _trained(self, peer: SimPeer, round_number: int) -> None:
        if peer.training is None or peer.training[0] != round_number or peer.hangs:
            return
        begun = peer.training[1]
        peer.training = None
        head = next(head for head in peer.heads if head.round == round_number - 1)
        steps = max(1, head.inner_steps * min(self.now_ms - begun, peer.line.train_ms) // peer.line.train_ms)
        pieces = []
        for part, value in enumerate(head.parts):
            blob = digest("delta", peer.peer_id, round_number, part)
            pieces.append(Piece(PieceKind.PSI, part, blob, 10, 0, value, pack_float(1.0)))
        for shard in head.state.shards_of(peer.peer_id):
            blob = digest("expert", peer.peer_id, round_number, shard)
            base = shard_row_hash(head.state.shards[shard])
            pieces.append(Piece(PieceKind.EXPERT, shard, blob, 10, 0, base, pack_float(1.0)))
        peer.blobs |= {piece.blob for piece in pieces}
        tokens = steps * self.config.training.batch_tokens
        event = fx.Trained(
            round=round_number, tokens=tokens, steps=steps, loss_micronats=2_000_000, pieces=tuple(pieces)
        )
        self.later(peer, peer.line.work_ms, event)

    def _transfer(self, peer: SimPeer, blob: Digest, sources: tuple[PeerId, ...]) -> bool:
        for source in sources:
            other = self.peers.get(source)
            if other is None or not other.alive or other.withholds or blob not in other.blobs:
                continue
            if not self.blocked(source, peer.peer_id):
                peer.blobs.add(blob)
                return True
        return blob in peer.blobs

    def _aggregate(self, peer: SimPeer, effect: fx.Aggregate) -> None:
        for contribution in effect.contributions:
            blob = contribution.pieces[effect.part].blob
            if not self._transfer(peer, blob, effect.sources.get(blob, ())):
                self._aggregate_later(peer, effect)
                return
        names = [digest("c", c.peer, c.manifest, int(c.weight * 4)) for c in effect.contributions]
        value = digest("result", effect.part, effect.previous, *names)
        value = peer.aggregates(value)
        if not effect.recheck:
            peer.blobs.add(value)
        event = fx.Aggregated(updates=effect.updates, part=effect.part, digest=value, recheck=effect.recheck)
        self.later(peer, peer.line.work_ms, event)

    def _aggregate_later(self, peer: SimPeer, effect: fx.Aggregate) -> None:
        """Try again while the round is open: a piece could not be had."""
        life, round_number = peer.life, peer.machine.head.round

        def again() -> None:
            if peer.life == life and peer.machine.head.round == round_number:
                self._aggregate(peer, effect)

        self.at(10 * peer.line.transfer_ms, again)

    def _adopt(self, peer: SimPeer, effect: fx.Adopt) -> None:
        self._check_adoption(peer, effect.head, effect.certificate)
        peer.certificates.append(effect.certificate)
        peer.heads.append(effect.head)
        prefix = f"{effect.head.epoch:06d}/{effect.head.round + 1:010d}/"
        peer.journal = {key: data for key, data in peer.journal.items() if key >= prefix}
        if peer.training is not None:
            self._trained(peer, peer.training[0])
        wanted = {*effect.head.parts, *(s.blob for row in effect.head.state.shards for s in row.blobs)}
        self._load(peer, effect.head, sorted(wanted - peer.blobs), effect.holders)
        for leaver, blob, _ in effect.handovers:
            if (
                leaver != peer.peer_id
                and peer.takes_over
                and any(peer.peer_id in effect.head.state.owners(shard) for shard in range(self.config.num_shards))
            ):
                event = fx.HandoverTaken(leaver=leaver, round=effect.head.round, handover=blob)
                self.later(peer, peer.line.transfer_ms, event)

    def _load(self, peer: SimPeer, head: Head, wanted: list[Digest], holders: tuple[PeerId, ...]) -> None:
        """Fetch what a state lacks, again and again until it is all here or a newer state took over."""
        sources = (*holders, *sorted(self.peers))
        missing = [blob for blob in wanted if not self._transfer(peer, blob, sources)]
        life = peer.life
        if not missing:
            self.later(peer, peer.line.transfer_ms, fx.StateReady(round=head.round + 1))
        elif peer.heads[-1] is head:
            self.at(500, lambda: self._load(peer, head, missing, holders) if peer.life == life else None)

    def _serve(self, peer: SimPeer, effect: fx.Serve) -> None:
        for certificate in peer.certificates:
            if certificate.body.round == effect.round:
                self._send(peer, fx.Send(ticket=0, to=effect.to, data=encode(certificate)))


def _signed_in(message: Message) -> tuple[Signed, ...]:
    match message:
        case Signed():
            return (message,)
        case CutMessage():
            return (message.announcement,)
        case ProposalMessage():
            return (message.proposal,)
        case _:
            return ()


def _lists(shards: tuple[tuple[BlobShare, ...], ...]) -> bytes:
    return digest("lists", *(share.blob for blobs in shards for share in blobs))
