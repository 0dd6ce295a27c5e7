"""A blob service with few places, over pairs of sockets: who asks it, and the fetcher that waits for its turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from random import Random

import msgspec
import pytest

from spes_p2p.digests import CHUNK_BYTES
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.network import transfer
from spes_p2p.network.assembly import Assembly
from spes_p2p.network.channel import Stream
from spes_p2p.network.scores import Offences, Traffic
from spes_p2p.network.serving import BlobService
from spes_p2p.network.transfer import Fetcher
from spes_p2p.network.wire import MAX_FRAME_BYTES, BlobAnswer, BlobRequest, read_frame, write_frame
from spes_p2p.testing.blobs import MemoryBlobs

SOURCE, ALICE, BOB = (PeerId(letter * 32) for letter in (b"s", b"a", b"b"))
WAIT_S = 30.0


class Served:
    """The service of SOURCE with one blob of twenty chunks, and streams to it."""

    def __init__(self, num_places: int) -> None:
        blobs = MemoryBlobs()
        self.blob: Digest = blobs.put(Random(1).randbytes(20 * CHUNK_BYTES))
        self.now_s = 100.0
        self.service = BlobService(blobs, Traffic(), now_s=lambda: self.now_s)
        self.service.places.set(num_places)
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, peer: PeerId) -> Stream:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=there)
        self.tasks.append(asyncio.create_task(self._serve(peer, reader, writer)))
        return await asyncio.open_connection(sock=here)

    async def _serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await self.service.serve(peer, reader, writer)

    async def asks(self, stream: Stream) -> str:
        """The problem of an answer to one chunk's request; empty: the chunk came."""
        reader, writer = stream
        write_frame(writer, msgspec.msgpack.encode(BlobRequest(self.blob, 0, 1)))
        async with asyncio.timeout(WAIT_S):
            answer = msgspec.msgpack.decode(await read_frame(reader, 64, SOURCE), type=BlobAnswer)
            if not answer.problem:
                assert len(await read_frame(reader, MAX_FRAME_BYTES, SOURCE)) == CHUNK_BYTES
        return answer.problem

    def fetcher(self, peer: PeerId, blobs: MemoryBlobs) -> Fetcher:
        return Fetcher(peer, blobs, lambda source: self.open(peer), Offences(lambda: 0.0), Traffic(), 1000)

    async def end(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.tasks)


@contextlib.asynccontextmanager
async def served(num_places: int) -> AsyncIterator[tuple[Served, Stream, Stream]]:
    """The service, and two streams of Alice's that hold as many places."""
    bench = Served(num_places)
    one, other = await bench.open(ALICE), await bench.open(ALICE)
    assert (await bench.asks(one), await bench.asks(other)) == ("", "")
    try:
        yield bench, one, other
    finally:
        one[1].close()
        other[1].close()
        await bench.end()


async def test_one_peer_with_all_places_gives_one_up_between_two_requests_when_another_comes() -> None:
    async with served(2) as (bench, one, other):
        assert [await bench.asks(stream) for stream in (one, other)] == ["", ""]  # alone it keeps them
        bobs = await bench.open(BOB)
        assert await bench.asks(bobs) == "busy"
        assert [await bench.asks(stream) for stream in (one, other)] == ["busy", ""]
        assert await bench.asks(one) == "busy"  # what it gave up is Bob's
        assert await bench.asks(bobs) == ""
        assert [await bench.asks(stream) for stream in (one, other, bobs)] == ["busy", "", ""]
        bobs[1].close()
        await bench.tasks[-1]
        assert await bench.asks(one) == ""


async def test_fetcher_waits_for_its_turn_at_a_busy_source_on_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUSY_PAUSE_S", 0.0)
    async with served(2) as (bench, one, _):
        blobs = MemoryBlobs()
        fetch = asyncio.create_task(bench.fetcher(BOB, blobs).fetch(bench.blob, [SOURCE], 1 << 30))
        async with asyncio.timeout(WAIT_S):
            while not bench.service.places.must_yield(ALICE):
                await asyncio.sleep(0)
            assert await bench.asks(one) == "busy"
            await fetch
        assert blobs.has(bench.blob)
        assert len(bench.tasks) == 4  # Alice's two, Bob's first look and the one that waited


async def test_fetcher_that_yields_in_the_middle_of_a_blob_goes_on_when_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUSY_PAUSE_S", 0.0)
    heard: list[str] = []
    write = Assembly.write
    async with served(2) as (bench, one, other):
        other[1].close()
        await bench.tasks[1]
        bobs = await bench.open(BOB)

        async def write_and_ask(assembly: Assembly, index: int, chunk: bytes) -> None:
            if not heard:
                heard.append(await bench.asks(bobs))
            await write(assembly, index, chunk)

        monkeypatch.setattr(Assembly, "write", write_and_ask)
        blobs = MemoryBlobs()
        fetch = asyncio.create_task(bench.fetcher(ALICE, blobs).fetch(bench.blob, [SOURCE], 1 << 30))
        async with asyncio.timeout(WAIT_S):
            while not heard or await bench.asks(bobs):
                await asyncio.sleep(0)
            assert (heard, fetch.done(), blobs.has(bench.blob)) == (["busy"], False, False)
            bobs[1].close()
            await fetch
        assert blobs.has(bench.blob)
        assert await bench.asks(one) == ""


async def test_a_source_that_is_always_busy_is_left_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUSY_PAUSE_S", 0.0)
    monkeypatch.setattr(transfer, "BUSY_PATIENCE_S", 0.1)
    async with served(2) as (bench, _, _):
        with pytest.raises(BlobError, match="busy"):
            await bench.fetcher(BOB, MemoryBlobs()).fetch(bench.blob, [SOURCE], 1 << 30)
