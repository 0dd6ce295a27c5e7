"""What the core needs from outside. Each port has one real implementation and one fake.

All but the clock have one contract suite for both (`tests/contract`).

port       real                            fake
Clock      node.clock.MonotonicClock       testing.clock.VirtualClock
Signer     crypto.Identity                 testing.signing.FastSigner
Verifier   crypto.verify                   testing.signing.verify_fast
BlobStore  storage.blobs.DiskBlobs         testing.blobs.MemoryBlobs
Journal    storage.journal.SqliteJournal   testing.journal.MemoryJournal
Transport  network.transport.P2PTransport  testing.network.MemoryTransport
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from spes_p2p.ids import Digest, PeerId


class Clock(Protocol):
    """Local monotonic time. Nothing in the protocol looks at the wall clock."""

    def now_ms(self) -> int:
        """Milliseconds since some fixed moment; never goes back."""
        ...


class Signer(Protocol):
    """Signs as one peer."""

    @property
    def peer_id(self) -> PeerId:
        """Who signs."""
        ...

    def sign(self, tag: str, payload: bytes) -> bytes:
        """64 bytes over (tag, payload)."""
        ...


Verifier: TypeAlias = Callable[[PeerId, str, bytes, bytes], bool]
"""(peer, tag, payload, signature) -> valid; False for anything malformed. `crypto.verify`, or a fast one."""


class BlobStore(Protocol):
    """Content-addressed bytes. What `put` returned the id of is durable: it survives a power cut."""

    def put(self, data: bytes | bytearray | memoryview) -> Digest:
        """Store bytes and return their id (`digests.blob_id`). Raises MachineError when the disk is full."""
        ...

    def has(self, blob: Digest) -> bool:
        """Whether the whole blob is here."""
        ...

    def size_bytes(self, blob: Digest) -> int:
        """Size of a blob that is here. Raises BlobError otherwise."""
        ...

    def chunks(self, blob: Digest) -> tuple[Digest, ...]:
        """Chunk hashes of a blob that is here. Raises BlobError otherwise."""
        ...

    def read(self, blob: Digest, start: int = 0, stop: int | None = None) -> memoryview:
        """Read-only bytes [start, stop) of a blob, memory-mapped where the store is on disk. Raises BlobError."""
        ...

    def partial(self, blob: Digest, size_bytes: int, chunks: Sequence[Digest]) -> PartialBlob:
        """Begin, or resume, the assembly of a blob from checked chunks. Raises BlobError if the list is wrong."""
        ...

    def delete(self, blob: Digest) -> None:
        """Forget a blob, and a partial one; no error if it is not here."""
        ...

    def ids(self) -> Iterable[Digest]:
        """All whole blobs, sorted."""
        ...


class PartialBlob(Protocol):
    """A blob that is being fetched, chunk by chunk, in any order; survives a restart of the process."""

    def missing(self) -> tuple[int, ...]:
        """Indices of the chunks not yet here, ascending."""
        ...

    def write(self, index: int, chunk: bytes) -> None:
        """Add one chunk. Raises BlobError if its hash is not the listed one."""
        ...

    def finish(self) -> None:
        """Make the whole blob durable and visible. Raises BlobError if a chunk is missing."""
        ...


class Journal(Protocol):
    """What this node has promised. `put` returns once all entries are durable, all or none of them."""

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Store entries under their keys, atomically, replacing what a key held before."""
        ...

    def scan(self, prefix: str = "") -> dict[str, bytes]:
        """All entries whose key starts with `prefix`, sorted by key."""
        ...

    def prune(self, keys: Iterable[str]) -> None:
        """Forget entries."""
        ...


MessageHandler: TypeAlias = Callable[[PeerId, bytes], Awaitable[None]]
"""Called with the authenticated sender and the raw bytes. It must raise RemoteProtocolError for hostile bytes."""

QuestionHandler: TypeAlias = Callable[[PeerId, bytes], Awaitable[Sequence[bytes]]]
"""Called with the authenticated asker and its question; returns the frames of the answer, at most 64 and 4 MiB in all.
It must raise RemoteProtocolError for hostile bytes."""


class Transport(Protocol):
    """Authenticated messages and blob transfers between peers."""

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        ...

    def set_message_handler(self, handler: MessageHandler) -> None:
        """Who gets incoming messages. To be called before the first message can arrive."""
        ...

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message, at most 4 MiB; returns when the other side has accepted it. Raises TransportError."""
        ...

    def set_question_handler(self, handler: QuestionHandler) -> None:
        """Who answers questions; before that, they are turned away."""
        ...

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """The frames of a peer's answer. Raises TransportError if it gives none, RemoteProtocolError if they are beyond
        the limits."""
        ...

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob of at most `max_bytes` from `sources` into the local store, resuming what is there, changing the
        source when one fails, is slower than the minimum rate, or serves wrong bytes. Raises BlobError when no source
        is left."""
        ...

    def bytes_sent(self) -> int:
        """Payload bytes of messages and blobs sent since the start."""
        ...

    def bytes_received(self) -> int:
        """Payload bytes of messages and blobs received since the start."""
        ...

    async def close(self) -> None:
        """End all transfers and the daemon; nothing is left running."""
        ...
