"""`SimPeer`: one simulated peer, with its machine, its disk, its clock and its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Signer
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.round import RoundMachine
from spes_p2p.protocol.wire import RefusalReason


def unchanged(value: Digest) -> Digest:
    """What an honest aggregator makes of its result."""
    return value


@dataclass(slots=True, kw_only=True)
class Line:
    """How a peer is connected and how fast it works. What a line does to a message, it does to those it sends."""

    latency_ms: tuple[int, int] = (1, 20)
    """Drawn for each message by itself: a wide range puts them out of order."""
    loss: float = 0.0
    duplication: float = 0.0
    rate_bytes_per_s: int | None = None
    """Each way; None: bytes cost nothing."""
    train_ms: int = 8_000
    work_ms: int = 20
    transfer_ms: int = 50
    """Of a blob, whatever its size; its bytes come on top."""

    def bytes_ms(self, num_bytes: int) -> int:
        """Time that bytes take over this line."""
        return 0 if self.rate_bytes_per_s is None else -(-num_bytes * 1000 // self.rate_bytes_per_s)


@dataclass(slots=True, kw_only=True)
class Flight:
    """A blob on its way to a peer."""

    due_ms: int
    ended: list[Callable[[bool], None]]
    """Whom to tell whether it came."""


@dataclass(slots=True)
class SimPeer:
    """One peer: its machine, its disk, its line."""

    name: str
    identity: Signer
    machine: RoundMachine
    line: Line
    alive: bool = True
    left: bool = False
    journal: dict[str, bytes] = field(default_factory=dict)
    """What is durable of it."""
    blobs: set[Digest] = field(default_factory=set)
    certificates: list[Certificate] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    """Of its ledger, the genesis first."""
    fetching: dict[Digest, Flight] = field(default_factory=dict)
    training: tuple[int, int] | None = None
    """(round, begun at)."""
    trains_on: Head | None = None
    """What the training began from."""
    notes: list[tuple[int, str, str]] = field(default_factory=list)
    timer_ms: int | None = None
    life: int = 0
    capacity: int = 2
    aggregates: Callable[[Digest], Digest] = unchanged
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
    byzantine: bool = False
    """It may break any rule."""
    once_byzantine: bool = False
    """It did, and keeps to the rules now; what it signed before may speak against it."""
    gone: bool = False
    """It is dead, and nobody starts it again."""
    sybil: bool = False
    """It joined to be many; nothing is expected of it."""
    frozen: bool = False
    """SIGSTOP: the process stands still, its lines stay open."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What came for it while it was frozen."""
    clock_rate: float = 1.0
    """Seconds of its clock in a second. To be set before time passes."""
    num_points: int = 0
    """Journal points passed so far (`disk.py`)."""
    crash_points: dict[int, int | None] = field(default_factory=dict)
    """Journal point -> how long it is down after a crash there (ms); None: until somebody restarts it."""
    uplink_free_ms: int = 0
    downlink_free_ms: int = 0
    bytes_sent: int = 0
    messages_sent: int = 0

    @property
    def peer_id(self) -> PeerId:
        """Raw public key."""
        return self.identity.peer_id

    @property
    def honest(self) -> bool:
        """Whether it keeps to the protocol, as far as anybody has said."""
        lies = self.tampers is not None or self.withholds or self.aggregates is not unchanged
        return not (self.byzantine or lies)

    @property
    def watched(self) -> bool:
        """Whether everything it ever signed must agree."""
        return self.tampers is None and not (self.byzantine or self.once_byzantine)

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.alive and not self.frozen

    def local_ms(self, now_ms: int) -> int:
        """What its clock shows."""
        return now_ms if self.clock_rate == 1.0 else int(now_ms * self.clock_rate)

    def global_ms(self, local_ms: int) -> int:
        """The first moment at which its clock shows that."""
        if self.clock_rate == 1.0:
            return local_ms
        at = math.ceil(local_ms / self.clock_rate)
        return at if self.local_ms(at) >= local_ms else at + 1
