"""Blobs for others: ranges of chunks, streamed, with a bound on how many streams are served at once.

A stream has a place (fairness.py) from its first request on; one without a place is told that this node is busy, and
may ask again. A peer with more than its share gives one back between two of its requests while others want some.

Where the upload rate is limited (pacing.py), chunks leave in slices, and fewer streams are served at once: a few peers
get a blob soon and can pass it on, while many slow streams would all be below the rate that a source must keep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from spes_p2p.digests import CHUNK_BYTES, DIGEST_BYTES, num_chunks
from spes_p2p.errors import BlobError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.network.fairness import FairPlaces
from spes_p2p.network.guards import StreamLimit
from spes_p2p.network.quotas import Quotas
from spes_p2p.network.scores import Traffic
from spes_p2p.network.wire import FRAME_HEAD_BYTES, BlobAnswer, BlobRequest, read_frame, write_frame
from spes_p2p.ports import BlobStore

MAX_STREAMS = 64
MAX_STREAMS_PER_PEER = 4
MAX_CHUNKS = 64
"""Per request."""
MAX_REQUEST_BYTES = 128
IDLE_TIMEOUT_S = 120.0
WRITE_TIMEOUT_S = 120.0
"""For one chunk, without the waits at the gate: a receiver slower than 9 KB/s is let go."""


class BlobService:
    """Serves `BLOB_STREAM` from a store. Each stream gets one chunk at a time, so that all advance alike."""

    def __init__(
        self,
        blobs: BlobStore,
        traffic: Traffic,
        quotas: Quotas | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quotas`: none if not given."""
        self._blobs = blobs
        self._traffic = traffic
        self._quotas = quotas or Quotas(None, now_s)
        self._limit = StreamLimit(MAX_STREAMS_PER_PEER)
        self.places = FairPlaces(MAX_STREAMS, MAX_STREAMS_PER_PEER, now_s)
        """Streams that are served at once."""

    async def serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a peer's requests until it closes the stream or falls silent."""
        has_place = False
        try:
            with self._limit.of(peer):
                while True:
                    request = await _read_request(peer, reader)
                    if has_place and self.places.must_yield(peer):
                        self.places.give_back(peer)
                        has_place = False
                    has_place = has_place or self.places.take(peer)
                    if has_place:
                        await self._serve_one(peer, request, writer)
                    else:
                        await _write(writer, msgspec.msgpack.encode(BlobAnswer(0, "busy")))
        except EOFError:
            return  # the peer has what it wanted
        finally:
            if has_place:
                self.places.give_back(peer)

    async def _serve_one(self, peer: PeerId, request: BlobRequest, writer: asyncio.StreamWriter) -> None:
        if not self._quotas.admit(peer):
            await _write(writer, msgspec.msgpack.encode(BlobAnswer(0, "busy")))
            return
        blob = Digest(request.blob)
        try:
            if self._traffic.withholds(blob):
                raise BlobError(self._traffic.no_blobs)
            size_bytes = await asyncio.to_thread(self._blobs.size_bytes, blob)
            chunks = await asyncio.to_thread(self._blobs.chunks, blob) if request.count == 0 else ()
        except BlobError:
            await _write(writer, msgspec.msgpack.encode(BlobAnswer(0, "absent")))
            return
        if request.count == 0:
            listed = b"".join(chunks)
            await self._traffic.up.message(FRAME_HEAD_BYTES + len(listed))
            await _write(writer, msgspec.msgpack.encode(BlobAnswer(size_bytes, "")), listed)
            self._quotas.charge(peer, len(listed))
            return
        if request.first + request.count > num_chunks(size_bytes):
            await _write(writer, msgspec.msgpack.encode(BlobAnswer(size_bytes, "malformed")))
            raise RemoteProtocolError(peer, "asks for chunks that the blob does not have")
        await _write(writer, msgspec.msgpack.encode(BlobAnswer(size_bytes, "")))
        for index in range(request.first, request.first + request.count):
            stop = min((index + 1) * CHUNK_BYTES, size_bytes)
            chunk = await asyncio.to_thread(self._read, blob, index * CHUNK_BYTES, stop)
            await self._write_chunk(writer, chunk)
            self._traffic.bytes_sent += len(chunk)
            self._quotas.charge(peer, len(chunk))
            if self._traffic.withholds(blob):
                raise EOFError  # in the middle of a range: the receiver goes to another source

    async def _write_chunk(self, writer: asyncio.StreamWriter, chunk: bytes) -> None:
        """One frame, in slices that pass the gate one after the other."""
        up, rest, left_s = self._traffic.up, memoryview(chunk), WRITE_TIMEOUT_S
        clock = asyncio.get_running_loop().time
        writer.write(len(chunk).to_bytes(FRAME_HEAD_BYTES, "big"))
        while rest:
            size = up.slice_bytes(len(rest))
            await up.blob(size)
            writer.write(rest[:size])
            rest = rest[size:]
            began_s = clock()
            async with asyncio.timeout(max(0.0, left_s)):
                await writer.drain()
            left_s -= clock() - began_s

    def _read(self, blob: Digest, start: int, stop: int) -> bytes:
        """In a thread: the disk may be slow, and the copy lets the memory map go."""
        return bytes(self._blobs.read(blob, start, stop))


async def _read_request(peer: PeerId, reader: asyncio.StreamReader) -> BlobRequest:
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        frame = await read_frame(reader, MAX_REQUEST_BYTES, peer)
    try:
        request = msgspec.msgpack.decode(frame, type=BlobRequest)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(peer, f"malformed request for a blob: {error}") from error
    if len(request.blob) != DIGEST_BYTES or request.first < 0 or not 0 <= request.count <= MAX_CHUNKS:
        raise RemoteProtocolError(peer, "request for a blob with values out of range")
    return request


async def _write(writer: asyncio.StreamWriter, *frames: bytes) -> None:
    for frame in frames:
        write_frame(writer, frame)
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await writer.drain()
