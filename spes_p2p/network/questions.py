"""Questions to one peer, each on a stream of its own: one frame there, a bounded number of frames back.

Unlike a message, a question is answered by whoever serves it without a round machine, so that a peer can ask before it
has one. What the bytes mean is the caller's business; how many there are, how often and how long, is bounded here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from spes_p2p.crypto import peer_text
from spes_p2p.errors import RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.channel import Stream
from spes_p2p.network.fairness import FairPlaces
from spes_p2p.network.guards import StreamLimit
from spes_p2p.network.quotas import Quotas
from spes_p2p.network.scores import Offences, Traffic
from spes_p2p.network.wire import (
    FRAME_HEAD_BYTES,
    MAX_ANSWER_BYTES,
    MAX_ANSWER_FRAMES,
    MAX_QUESTION_BYTES,
    read_frame,
    write_frame,
)
from spes_p2p.ports import QuestionHandler

MAX_STREAMS = 16
MAX_STREAMS_PER_PEER = 2
MAX_QUESTIONS_PER_MINUTE = 400
"""Of one peer: a chain of 10,000 rounds takes 160."""
ANSWER_TIMEOUT_S = 60.0
"""For a whole answer: 70 KB/s bring the largest one."""
_MAX_PEERS = 4096


class AnswerHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Precedes the frames of an answer, unless there is a problem."""

    num_frames: int
    problem: Literal["", "busy", "refused"]


class QuestionService:
    """Serves `QUESTION_STREAM`."""

    def __init__(
        self,
        now_s: Callable[[], float],
        fail: Callable[[BaseException], None],
        offences: Offences,
        traffic: Traffic,
        quotas: Quotas | None = None,
    ) -> None:
        """`fail` is told of a bug in the handler; `quotas`: none if not given."""
        self._now_s = now_s
        self._fail = fail
        self._offences = offences
        self._traffic = traffic
        self._quotas = quotas or Quotas(None, now_s)
        self._handler: QuestionHandler | None = None
        self._limit = StreamLimit(MAX_STREAMS_PER_PEER)
        self._places = FairPlaces(MAX_STREAMS, MAX_STREAMS_PER_PEER, now_s)
        self._asked_at_s: dict[PeerId, deque[float]] = {}

    def set_handler(self, handler: QuestionHandler) -> None:
        """Who answers."""
        self._handler = handler

    async def serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question. Raises RemoteProtocolError if the peer opens too many streams or asks nonsense."""
        with self._limit.of(peer):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                question = await read_frame(reader, MAX_QUESTION_BYTES, peer)
            if self._handler is None or not self._may_ask(peer) or not self._places.take(peer):
                await self._write(reader, writer, AnswerHead(0, "busy"))
                return
            try:
                await self._answer(self._handler, peer, question, reader, writer)
            finally:
                self._places.give_back(peer)

    async def _answer(
        self,
        handler: QuestionHandler,
        peer: PeerId,
        question: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            frames = await handler(peer, question)
        except RemoteProtocolError as error:
            self._offences.add(peer, error.reason)
            await self._write(reader, writer, AnswerHead(0, "refused"))
            return
        except Exception as bug:
            self._fail(bug)
            raise
        await self._write(reader, writer, AnswerHead(len(frames), ""), *frames)
        num_bytes = sum(map(len, frames))
        self._traffic.bytes_sent += num_bytes
        self._quotas.charge(peer, num_bytes)

    async def _write(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: AnswerHead, *frames: bytes
    ) -> None:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for frame in (msgspec.msgpack.encode(head), *frames):
                await self._traffic.up.message(FRAME_HEAD_BYTES + len(frame))
                write_frame(writer, frame)
                await writer.drain()
            await reader.read(1)  # until the other side, having read the answer, closes

    def _may_ask(self, peer: PeerId) -> bool:
        if self._offences.is_shunned(peer) or not self._quotas.admit(peer):
            return False
        if peer not in self._asked_at_s and len(self._asked_at_s) >= _MAX_PEERS:
            del self._asked_at_s[next(iter(self._asked_at_s))]
        times = self._asked_at_s.setdefault(peer, deque())
        now_s = self._now_s()
        while times and times[0] < now_s - 60.0:
            times.popleft()
        if len(times) >= MAX_QUESTIONS_PER_MINUTE:
            return False
        times.append(now_s)
        return True


async def ask(
    peer: PeerId, question: bytes, open_stream: Callable[[PeerId], Awaitable[Stream]], traffic: Traffic
) -> tuple[bytes, ...]:
    """The frames of a peer's answer. Raises TransportError if it gives none in time, RemoteProtocolError if what it
    gives is beyond the limits."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await open_stream(peer)
            with contextlib.closing(writer):
                write_frame(writer, question)
                await writer.drain()
                return await _read_answer(peer, reader, traffic)
    except TimeoutError as error:
        raise TransportError(f"no answer from {peer_text(peer)} within {ANSWER_TIMEOUT_S:.0f} s") from error
    except (OSError, EOFError) as error:
        raise TransportError(f"{peer_text(peer)} broke off its answer") from error


async def _read_answer(peer: PeerId, reader: asyncio.StreamReader, traffic: Traffic) -> tuple[bytes, ...]:
    try:
        head = msgspec.msgpack.decode(await read_frame(reader, 64, peer), type=AnswerHead)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(peer, f"malformed answer: {error}") from error
    if head.problem:
        raise TransportError(f"{peer_text(peer)} does not answer: {head.problem}")
    if not 0 <= head.num_frames <= MAX_ANSWER_FRAMES:
        raise RemoteProtocolError(peer, f"an answer of {head.num_frames} frames")
    frames: list[bytes] = []
    left = MAX_ANSWER_BYTES
    for _ in range(head.num_frames):
        frames.append(await read_frame(reader, left, peer))
        left -= len(frames[-1])
        traffic.bytes_received += len(frames[-1])
        traffic.down.charge(FRAME_HEAD_BYTES + len(frames[-1]))
    return tuple(frames)
