"""Fetching blobs: from several sources at once, each chunk checked, resumed where it stopped.

Sources are drawn from in an order that differs from peer to peer, so that not everybody asks the same one; those with
offences come last. A source that breaks off, serves wrong bytes or is slower than the minimum rate is left, and the
ranges it did not deliver go to another one. Slow and busy ones get a second chance, with more patience, when all
others have failed.

Where the download rate is limited (pacing.py), chunks are read in slices that pass its gate, and a source is judged by
the time that reading took, without the waits at the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from spes_p2p.crypto import peer_text
from spes_p2p.digests import CHUNK_BYTES, DIGEST_BYTES, digest
from spes_p2p.errors import BlobError, RemoteProtocolError, TransportError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.network.assembly import Assembly, TooLargeError
from spes_p2p.network.channel import Stream
from spes_p2p.network.pacing import Gate, Places
from spes_p2p.network.scores import Offences, Traffic
from spes_p2p.network.wire import (
    FRAME_HEAD_BYTES,
    MAX_FRAME_BYTES,
    BlobAnswer,
    BlobRequest,
    read_frame,
    write_frame,
)
from spes_p2p.ports import BlobStore

MAX_SOURCES_AT_ONCE = 3
MAX_DRAWS = 256
"""At once, over all blobs; fewer where the download rate is limited."""
MAX_TRANSFERS_PER_SOURCE = 2
"""At once, so that a slow one blocks no other."""
ANSWER_TIMEOUT_S = 15.0
PATIENT_ANSWER_TIMEOUT_S = 60.0
BUSY_PAUSE_S = 1.0
BUSY_PATIENCE_S = 300.0
"""How long a source may say that it is busy before it is left for good."""
RATE_GRACE_S = 10.0
"""Reading time before the rate of a source is judged."""
PATIENCE_RATE = 0.1
"""The share of the minimum rate that does for a second chance."""

logger = logging.getLogger(__name__)


class SlowSourceError(TransportError):
    """A source is below the minimum rate, silent, or busy."""


@dataclass(slots=True)
class _Hunt:
    """One fetch: what is left of the sources, and why the others were left."""

    assembly: Assembly
    fresh: deque[PeerId]
    slow: deque[PeerId] = field(default_factory=deque)
    reasons: dict[PeerId, str] = field(default_factory=dict)


class Fetcher:
    """Brings blobs into the store."""

    def __init__(
        self,
        me: PeerId,
        blobs: BlobStore,
        open_stream: Callable[[PeerId], Awaitable[Stream]],
        offences: Offences,
        traffic: Traffic,
        min_rate_bytes_per_s: int,
    ) -> None:
        """`open_stream` gives a fresh blob stream to a peer, or raises TransportError."""
        self._me = me
        self._blobs = blobs
        self._open_stream = open_stream
        self._offences = offences
        self._traffic = traffic
        self.min_rate_bytes_per_s = min_rate_bytes_per_s
        self.draws = Places(MAX_DRAWS)
        """How many sources are drawn from at once, over all blobs."""
        self._places: dict[PeerId, asyncio.Semaphore] = {}
        self._under_way: dict[Digest, tuple[asyncio.Lock, int]] = {}

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int) -> None:
        """Bring one blob into the store; a second fetch of the same blob waits for the first.

        Raises BlobError when no source is left, with the reason of each, or if the blob is larger than `max_bytes`.
        """
        lock, num_fetches = self._under_way.get(blob, (asyncio.Lock(), 0))
        self._under_way[blob] = lock, num_fetches + 1
        try:
            async with lock:
                if self._traffic.no_blobs and not await asyncio.to_thread(self._blobs.has, blob):
                    raise BlobError(f"blob {blob.hex()} is not fetched: {self._traffic.no_blobs}")
                if not await asyncio.to_thread(self._blobs.has, blob):
                    await self._fetch(Assembly(self._blobs, blob, max_bytes), sources)
        finally:
            _, num_fetches = self._under_way.pop(blob)
            if num_fetches > 1:
                self._under_way[blob] = lock, num_fetches - 1

    async def _fetch(self, assembly: Assembly, sources: Sequence[PeerId]) -> None:
        others = sorted({source for source in sources if source != self._me}, key=lambda s: self._rank(s, assembly))
        hunt = _Hunt(assembly, deque(others))
        await self._draw_from_all(hunt, hunt.fresh, patient=False)
        if not assembly.is_complete:
            await self._draw_from_all(hunt, hunt.slow, patient=True)
        if not assembly.is_complete:
            reasons = "; ".join(f"{peer_text(peer)}: {reason}" for peer, reason in hunt.reasons.items())
            raise BlobError(f"blob {assembly.blob.hex()}: no source is left ({reasons or 'none was given'})")
        await assembly.finish()

    def _rank(self, source: PeerId, assembly: Assembly) -> tuple[int, Digest]:
        return self._offences.count(source), digest("spes source order", self._me, assembly.blob, source)

    async def _draw_from_all(self, hunt: _Hunt, waiting: deque[PeerId], *, patient: bool) -> None:
        """Draw from sources, several at once where there is enough to fetch, until all is here or none is left."""
        running: set[asyncio.Task[None]] = set()
        planned = asyncio.create_task(hunt.assembly.wait_planned())
        try:
            while not hunt.assembly.is_complete:
                wanted = min(MAX_SOURCES_AT_ONCE, hunt.assembly.num_ranges) if hunt.assembly.is_planned else 1
                while waiting and len(running) < max(wanted, 1):
                    running.add(asyncio.create_task(self._draw(hunt, waiting.popleft(), patient=patient)))
                if not running:
                    return
                events = running if planned.done() else {*running, planned}
                done, _ = await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                running -= done
        finally:
            for task in (*running, planned):
                task.cancel()
            await asyncio.gather(*running, planned, return_exceptions=True)

    async def _draw(self, hunt: _Hunt, source: PeerId, *, patient: bool) -> None:
        """Take what one source gives, and note why it gave no more."""
        places = self._places.setdefault(source, asyncio.Semaphore(MAX_TRANSFERS_PER_SOURCE))
        try:
            async with places, self.draws:
                reader, writer = await self._open_stream(source)
                with contextlib.closing(writer):
                    min_rate = self.min_rate_bytes_per_s * (PATIENCE_RATE if patient else 1)
                    drawing = _Drawing(source, reader, writer, min_rate, self._traffic.down)
                    await self._plan(hunt.assembly, drawing, patient=patient)
                    while (taken := await hunt.assembly.take()) is not None:
                        await self._draw_range(hunt.assembly, drawing, *taken, patient=patient)
        except TooLargeError:
            raise
        except SlowSourceError as error:
            hunt.reasons[source] = str(error)
            if not patient:
                hunt.slow.append(source)
        except (BlobError, RemoteProtocolError) as error:
            self._offences.add(source, f"blob {hunt.assembly.blob.hex()[:16]}: {error}")
            hunt.reasons[source] = str(error)
        except TransportError as error:
            hunt.reasons[source] = str(error)
        except (OSError, EOFError):
            hunt.reasons[source] = "broke off"

    async def _plan(self, assembly: Assembly, drawing: _Drawing, *, patient: bool) -> None:
        timeout_s = PATIENT_ANSWER_TIMEOUT_S if patient else ANSWER_TIMEOUT_S
        answer = await _ask(drawing, BlobRequest(assembly.blob, 0, 0), timeout_s, patient=patient)
        listed = await drawing.read(MAX_FRAME_BYTES, timeout_s)
        self._traffic.down.charge(FRAME_HEAD_BYTES + len(listed))
        if len(listed) % DIGEST_BYTES:
            raise BlobError("sent a malformed chunk list")
        chunks = tuple(Digest(listed[at : at + DIGEST_BYTES]) for at in range(0, len(listed), DIGEST_BYTES))
        await assembly.plan(answer.size_bytes, chunks)

    async def _draw_range(self, assembly: Assembly, drawing: _Drawing, start: int, stop: int, *, patient: bool) -> None:
        at = start
        try:
            request = BlobRequest(assembly.blob, start, stop - start)
            await _ask(drawing, request, ANSWER_TIMEOUT_S, patient=patient)
            while at < stop:
                if self._traffic.no_blobs:
                    raise TransportError(self._traffic.no_blobs)
                chunk = await drawing.read_chunk()
                self._traffic.bytes_received += len(chunk)
                await assembly.write(at, chunk)
                at += 1
        finally:
            await asyncio.shield(assembly.give_back(at, stop))


class _Drawing:
    """An open blob stream to one source, and how fast it has been."""

    def __init__(
        self, source: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, min_rate: float, gate: Gate
    ) -> None:
        self._source = source
        self._reader = reader
        self._writer = writer
        self._min_rate = min_rate
        self._gate = gate
        self._read_s = 0.0
        self._num_bytes = 0

    async def ask(self, request: BlobRequest, timeout_s: float) -> BlobAnswer:
        """Send a request and return the head of the answer."""
        write_frame(self._writer, msgspec.msgpack.encode(request))
        await self._writer.drain()
        frame = await self.read(64, timeout_s)
        try:
            return msgspec.msgpack.decode(frame, type=BlobAnswer)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(self._source, f"malformed answer: {error}") from error

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """The next frame. Raises SlowSourceError if it takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await read_frame(self._reader, max_bytes, self._source)
        except TimeoutError as error:
            raise SlowSourceError(f"slower than the minimum rate: nothing whole within {timeout_s:.0f} s") from error

    async def read_chunk(self) -> bytes:
        """The next chunk. Raises SlowSourceError if the source falls below the minimum rate."""
        patience_s = RATE_GRACE_S + CHUNK_BYTES / self._min_rate
        until_s = self._read_s + patience_s
        try:
            size = int.from_bytes(await self._read_timed(FRAME_HEAD_BYTES, until_s), "big")
            if size > CHUNK_BYTES:
                raise RemoteProtocolError(self._source, f"frame of {size} bytes, at most {CHUNK_BYTES} are allowed")
            slices: list[bytes] = []
            while size:
                slice_bytes = self._gate.slice_bytes(size)
                await self._gate.blob(slice_bytes)
                slices.append(await self._read_timed(slice_bytes, until_s))
                size -= slice_bytes
        except TimeoutError as error:
            words = f"slower than the minimum rate: nothing whole within {patience_s:.0f} s"
            raise SlowSourceError(words) from error
        chunk = slices[0] if len(slices) == 1 else b"".join(slices)
        self._num_bytes += len(chunk)
        if self._read_s > RATE_GRACE_S and self._num_bytes < self._min_rate * self._read_s:
            rate = self._num_bytes / self._read_s / 1000
            raise SlowSourceError(f"slower than the minimum rate: {rate:.0f} of {self._min_rate / 1000:.0f} KB/s")
        return chunk

    async def _read_timed(self, num_bytes: int, until_s: float) -> bytes:
        """So many bytes, on the clock of reading. Raises TimeoutError when that reaches `until_s`."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(max(0.0, until_s - self._read_s)):
                return await self._reader.readexactly(num_bytes)
        finally:
            self._read_s += clock() - began_s


async def _ask(drawing: _Drawing, request: BlobRequest, timeout_s: float, *, patient: bool) -> BlobAnswer:
    """The answer that announces bytes; `patient`: a busy source is asked again for up to BUSY_PATIENCE_S.

    Raises SlowSourceError if it is busy all the same, TransportError if it has not got the blob.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + (BUSY_PATIENCE_S if patient else 0.0)
    while (answer := await drawing.ask(request, timeout_s)).problem == "busy":
        if clock() >= until_s:
            raise SlowSourceError("busy")
        await asyncio.sleep(BUSY_PAUSE_S)
    if answer.problem:
        raise TransportError(f"the blob is {answer.problem} there")
    return answer
