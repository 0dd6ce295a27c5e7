"""`MemoryNetwork` and `MemoryTransport`: peers in one process, with loss, delay and partitions drawn from a seed.

Messages are handed over inside `send`, so that without faults an exchange is finished when `send` returns. Delays wait
on the `sleep_ms` given (`VirtualClock.sleep_ms` in tests), never on the real clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from spes_p2p.digests import CHUNK_BYTES, blob_id_of_chunks, num_chunks
from spes_p2p.errors import BlobError, RemoteProtocolError, TransportError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.network.wire import MAX_ANSWER_BYTES, MAX_ANSWER_FRAMES, MAX_QUESTION_BYTES
from spes_p2p.ports import BlobStore, MessageHandler, PartialBlob, QuestionHandler

MAX_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the network does to every message and chunk; both ends of a link draw from the same seeded source."""

    loss: float = 0.0
    """Probability, 0 to 1, that a message or chunk does not get through."""
    min_delay_ms: int = 0
    max_delay_ms: int = 0


class MemoryNetwork:
    """Who is there, and how the lines between them are."""

    def __init__(
        self,
        random: Random,
        faults: Faults | None = None,
        sleep_ms: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._random = random
        self._sleep_ms = sleep_ms
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._island: dict[PeerId, int] = {}
        self.set_faults(faults or Faults())

    def set_faults(self, faults: Faults) -> None:
        """From now on. Raises ValueError if they ask for a delay and the network got no `sleep_ms`."""
        if faults.max_delay_ms and self._sleep_ms is None:
            raise ValueError("delays need a clock to wait on: give sleep_ms")
        self._faults = faults

    def partition(self, *islands: Iterable[PeerId]) -> None:
        """Cut all lines between different islands; peers in none of them form one of their own."""
        self._island = {peer: number for number, peers in enumerate(islands, start=1) for peer in peers}

    def heal(self) -> None:
        """Mend all lines."""
        self._island = {}

    def attach(self, transport: MemoryTransport) -> None:
        """Take a peer in. Raises TransportError if its identity is there already."""
        if transport.peer_id in self._transports:
            raise TransportError("identity in use: a peer with this key is on the network already")
        self._transports[transport.peer_id] = transport

    def detach(self, transport: MemoryTransport) -> None:
        """Let a peer go; harmless when repeated."""
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]

    async def reach(self, sender: PeerId, receiver: PeerId) -> MemoryTransport:
        """The other end, after the line's delay. Raises TransportError if the line, the message or the peer is lost."""
        faults = self._faults
        is_lost = self._random.random() < faults.loss
        delay_ms = self._random.randint(faults.min_delay_ms, faults.max_delay_ms)
        if self._sleep_ms is None:
            await asyncio.sleep(0)
        else:
            await self._sleep_ms(delay_ms)
        other = self._transports.get(receiver)
        if other is None:
            raise TransportError(f"peer {receiver.hex()[:8]} is not on the network")
        if is_lost or self._island.get(sender, 0) != self._island.get(receiver, 0):
            raise TransportError(f"lost on the way to {receiver.hex()[:8]}")
        return other


class MemoryTransport:
    """Satisfies `ports.Transport`. Serves the blobs of `blobs` to everybody, and fetches into it."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, blobs: BlobStore) -> None:
        self._network = network
        self._peer_id = peer_id
        self._blobs = blobs
        self._handler: MessageHandler | None = None
        self._question_handler: QuestionHandler | None = None
        self._is_open = True
        self._bytes_sent = 0
        self._bytes_received = 0
        network.attach(self)

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        return self._peer_id

    def set_message_handler(self, handler: MessageHandler) -> None:
        """Who gets incoming messages."""
        self._handler = handler

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message; returns when the other side's handler has taken it.

        Raises TransportError if it is above 4 MiB, lost, refused by the other side, or a side is closed.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise TransportError(f"a message of {len(data)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        other = await self._reach(peer)
        await other._accept(self._peer_id, bytes(data))
        self._bytes_sent += len(data)

    def set_question_handler(self, handler: QuestionHandler) -> None:
        """Who answers questions."""
        self._question_handler = handler

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """The frames of a peer's answer. Raises TransportError if it is lost, refused, or a side is closed,
        RemoteProtocolError if the answer is beyond the limits."""
        other = await self._reach(peer)
        frames = await other._answer(self._peer_id, bytes(question))
        await self._reach(peer)
        if len(frames) > MAX_ANSWER_FRAMES or sum(map(len, frames)) > MAX_ANSWER_BYTES:
            raise RemoteProtocolError(peer, "an answer beyond the limits")
        self._bytes_received += sum(map(len, frames))
        return frames

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob of at most `max_bytes` into the local store from the first source that serves it rightly.

        What is there in part is resumed.
        Raises BlobError when no source is left, with each one's reason.
        """
        if self._blobs.has(blob):
            return
        reasons = []
        for source in sources:
            try:
                await self._fetch_from(source, blob, max_bytes)
            except (TransportError, BlobError) as error:
                reasons.append(f"{source.hex()[:8]}: {error}")
            else:
                return
        raise BlobError(f"blob {blob.hex()}: no source is left ({'; '.join(reasons) or 'none was given'})")

    def bytes_sent(self) -> int:
        """Payload bytes of messages and blobs sent since the start."""
        return self._bytes_sent

    def bytes_received(self) -> int:
        """Payload bytes of messages and blobs received since the start."""
        return self._bytes_received

    async def close(self) -> None:
        """Leave the network; harmless when repeated."""
        self._is_open = False
        self._network.detach(self)

    async def _reach(self, peer: PeerId) -> MemoryTransport:
        if not self._is_open:
            raise TransportError("this transport is closed")
        return await self._network.reach(self._peer_id, peer)

    async def _accept(self, sender: PeerId, data: bytes) -> None:
        if self._handler is None:
            raise TransportError(f"peer {self._peer_id.hex()[:8]} takes no messages yet")
        self._bytes_received += len(data)
        try:
            await self._handler(sender, data)
        except RemoteProtocolError as error:
            raise TransportError(f"peer {self._peer_id.hex()[:8]} refused the message: {error.reason}") from error

    async def _answer(self, asker: PeerId, question: bytes) -> tuple[bytes, ...]:
        if self._question_handler is None or len(question) > MAX_QUESTION_BYTES:
            raise TransportError(f"peer {self._peer_id.hex()[:8]} does not answer")
        try:
            frames = tuple(await self._question_handler(asker, question))
        except RemoteProtocolError as error:
            raise TransportError(f"peer {self._peer_id.hex()[:8]} does not answer: refused") from error
        self._bytes_sent += sum(map(len, frames))
        return frames

    async def _fetch_from(self, source: PeerId, blob: Digest, max_bytes: int | None) -> None:
        other = await self._reach(source)
        size_bytes, chunks = other._blobs.size_bytes(blob), other._blobs.chunks(blob)
        if len(chunks) != num_chunks(size_bytes) or blob_id_of_chunks(size_bytes, chunks) != blob:
            raise BlobError("it sent a chunk list of another blob")
        if max_bytes is not None and size_bytes > max_bytes:
            raise BlobError(f"it has {size_bytes} bytes, at most {max_bytes} are wanted")
        partial: PartialBlob = self._blobs.partial(blob, size_bytes, chunks)
        for index in partial.missing():
            other = await self._reach(source)
            chunk = other._serve(blob, index)
            self._bytes_received += len(chunk)
            partial.write(index, chunk)
        partial.finish()

    def _serve(self, blob: Digest, index: int) -> bytes:
        stop = min((index + 1) * CHUNK_BYTES, self._blobs.size_bytes(blob))
        chunk = bytes(self._blobs.read(blob, index * CHUNK_BYTES, stop))
        self._bytes_sent += len(chunk)
        return chunk
