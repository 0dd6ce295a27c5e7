"""Questions over a pair of sockets: what is served, and what is turned away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import pytest

from spes_p2p.errors import RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.channel import Stream
from spes_p2p.network.questions import MAX_QUESTIONS_PER_MINUTE, MAX_STREAMS_PER_PEER, AnswerHead, QuestionService, ask
from spes_p2p.network.scores import MAX_OFFENCES, Offences, Traffic
from spes_p2p.network.wire import MAX_QUESTION_BYTES, write_frame

ASKER, ANSWERER = PeerId(b"a" * 32), PeerId(b"b" * 32)


class Served:
    """A service, and streams to it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.bugs: list[BaseException] = []
        self.offences = Offences(lambda: self.now_s)
        self.service = QuestionService(lambda: self.now_s, self.bugs.append, self.offences, Traffic())
        self.tasks: list[asyncio.Task[None]] = []
        self.problems: list[BaseException] = []

    async def open(self, peer: PeerId) -> Stream:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=there)
        self.tasks.append(asyncio.create_task(self._serve(reader, writer)))
        return await asyncio.open_connection(sock=here)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.service.serve(ASKER, reader, writer)
        except (RemoteProtocolError, EOFError, LookupError) as problem:
            self.problems.append(problem)
        finally:
            writer.close()

    async def ask(self, question: bytes) -> tuple[bytes, ...]:
        try:
            return await ask(ANSWERER, question, self.open, Traffic())
        finally:
            await asyncio.gather(*self.tasks)


async def echo(asker: PeerId, question: bytes) -> Sequence[bytes]:
    return [question]


async def test_nobody_answers_before_there_is_a_handler() -> None:
    served = Served()
    with pytest.raises(TransportError, match="does not answer: busy"):
        await served.ask(b"tip")
    served.service.set_handler(echo)
    assert await served.ask(b"tip") == (b"tip",)


async def test_hostile_questions_are_refused_and_count_as_offences() -> None:
    served = Served()

    async def refuse(asker: PeerId, question: bytes) -> Sequence[bytes]:
        raise RemoteProtocolError(asker, "malformed")

    served.service.set_handler(refuse)
    with pytest.raises(TransportError, match="does not answer: refused"):
        await served.ask(b"nonsense")
    assert served.offences.count(ASKER) == 1


async def test_a_peer_with_too_many_offences_is_not_answered() -> None:
    served = Served()
    served.service.set_handler(echo)
    for _ in range(MAX_OFFENCES):
        served.offences.add(ASKER, "lies")
    with pytest.raises(TransportError, match="busy"):
        await served.ask(b"tip")


async def test_more_questions_a_minute_than_allowed_are_turned_away() -> None:
    served = Served()
    served.service.set_handler(echo)
    for _ in range(MAX_QUESTIONS_PER_MINUTE):
        await served.ask(b"tip")
        served.tasks.clear()
    with pytest.raises(TransportError, match="busy"):
        await served.ask(b"tip")
    served.now_s += 61.0
    assert await served.ask(b"tip") == (b"tip",)


async def test_a_peer_may_have_few_streams_at_once() -> None:
    served = Served()
    served.service.set_handler(echo)
    idle = [await served.open(ASKER) for _ in range(MAX_STREAMS_PER_PEER)]
    await asyncio.sleep(0)  # the service begins with them
    with pytest.raises(TransportError, match="broke off"):
        await ask(ANSWERER, b"tip", served.open, Traffic())
    for _, writer in idle:
        writer.close()
    await asyncio.gather(*served.tasks)
    assert any("streams at once" in str(problem) for problem in served.problems)
    assert await served.ask(b"tip") == (b"tip",)


async def test_a_question_above_the_limit_ends_the_stream() -> None:
    served = Served()
    served.service.set_handler(echo)
    with pytest.raises(TransportError, match="broke off"):
        await served.ask(bytes(MAX_QUESTION_BYTES + 1))
    assert [type(problem) for problem in served.problems] == [RemoteProtocolError]


async def test_a_bug_in_the_handler_is_told_and_ends_the_stream() -> None:
    served = Served()

    async def fail(asker: PeerId, question: bytes) -> Sequence[bytes]:
        raise LookupError("a bug")

    served.service.set_handler(fail)
    with pytest.raises(TransportError, match="broke off"):
        await served.ask(b"tip")
    assert [str(bug) for bug in served.bugs] == ["a bug"]


Answerer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def answered_by(answerer: Answerer) -> tuple[bytes, ...]:
    """What `ask` makes of an answer that somebody writes by hand."""
    here, there = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=there)

    async def open_stream(peer: PeerId) -> Stream:
        return await asyncio.open_connection(sock=here)

    try:
        await answerer(writer)
        return await ask(ANSWERER, b"tip", open_stream, Traffic())
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("frames", "error", "why"),
    [
        ([b"\xc1"], RemoteProtocolError, "malformed answer"),
        ([msgspec.msgpack.encode(AnswerHead(65, ""))], RemoteProtocolError, "an answer of 65 frames"),
        ([msgspec.msgpack.encode(AnswerHead(-1, ""))], RemoteProtocolError, "an answer of -1 frames"),
        ([bytes(65)], RemoteProtocolError, "at most 64"),
        ([msgspec.msgpack.encode(AnswerHead(2, "")), b"one"], TransportError, "broke off"),
    ],
)
async def test_answers_that_are_none(frames: list[bytes], error: type[Exception], why: str) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for frame in frames:
            write_frame(writer, frame)
        writer.write_eof()

    with pytest.raises(error, match=why):
        await answered_by(answer)
