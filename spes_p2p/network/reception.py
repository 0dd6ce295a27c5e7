"""The receiving half of message channels: who may come in, and what happens to what they say.

One channel per peer. Handlers of one peer's messages are started in the order of arrival; at most 32 messages and
8 MiB of a peer are being handled at a time, beyond that its stream is not read, so that it has to wait.

A second process with the identity of a peer that is here already is found by its session: the first one is asked for a
sign of life; if it gives one, the second is refused, if not, it takes the first one's place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from spes_p2p.crypto import peer_text
from spes_p2p.digests import DIGEST_BYTES
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.hints import MAX_ADDRESSES, SESSION_BYTES
from spes_p2p.network.quotas import Quotas
from spes_p2p.network.scores import Offences, Traffic
from spes_p2p.network.wire import (
    FRAME_HEAD_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_REASON_BYTES,
    Hello,
    Kind,
    Refusal,
    Welcome,
    channel_head,
    differences,
    parse_channel_frame,
    read_frame,
    write_frame,
)
from spes_p2p.ports import MessageHandler

HELLO_TIMEOUT_S = 60.0
SIGN_OF_LIFE_TIMEOUT_S = 5.0
MAX_VISITORS = 512
MAX_HANDLED = 32
MAX_HANDLED_BYTES = 8 << 20

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Visitor:
    """A peer whose channel is open."""

    peer: PeerId
    session: bytes
    run: RunId | None
    """The run that it says it takes part in."""
    writer: asyncio.StreamWriter
    pong: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_handled: int = 0
    handled_bytes: int = 0

    def has_room(self, size: int) -> bool:
        """Whether another message of `size` bytes may be handled now."""
        return self.num_handled == 0 or (
            self.num_handled < MAX_HANDLED and self.handled_bytes + size <= MAX_HANDLED_BYTES
        )


class Reception:
    """Serves `MESSAGE_STREAM`."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        learn: Callable[[PeerId, Sequence[str]], None],
        fail: Callable[[BaseException], None],
        offences: Offences,
        traffic: Traffic,
        quotas: Quotas | None = None,
        max_visitors: int = MAX_VISITORS,
    ) -> None:
        """`quotas`: of channels that are opened; none if not given."""
        self._quotas = quotas or Quotas(None, time.monotonic)
        self._max_visitors = max_visitors
        self._hello = hello
        self._learn = learn
        self._fail = fail
        self._offences = offences
        self._traffic = traffic
        self._handler: MessageHandler | None = None
        self._visitors: dict[PeerId, Visitor] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def set_handler(self, handler: MessageHandler) -> None:
        """Who gets the messages."""
        self._handler = handler

    def is_here(self, peer: PeerId) -> bool:
        """Whether the peer has a channel to this node."""
        return peer in self._visitors

    @property
    def runs(self) -> Mapping[PeerId, RunId | None]:
        """Everybody who has a channel to this node, and the run that each says it takes part in."""
        return {visitor.peer: visitor.run for visitor in self._visitors.values()}

    async def close(self) -> None:
        """Stop all handlers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One incoming channel, from hello to its end."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            theirs = _parse_hello(peer, await read_frame(reader, MAX_HELLO_BYTES, peer))
            refusal = await self._judge(peer, theirs)
            write_frame(writer, msgspec.msgpack.encode(Welcome(hello=self._hello(), refusal=refusal)))
            if not refusal:
                visitor = Visitor(peer, theirs.session, RunId(theirs.run) if theirs.run else None, writer)
                self._visitors[peer] = visitor
            await writer.drain()
        if refusal:
            await reader.read(1)  # until the other side, having read the answer, closes
            return
        try:
            self._learn(peer, theirs.addresses)
            await self._listen(visitor, reader)
        finally:
            if self._visitors.get(peer) is visitor:
                del self._visitors[peer]

    async def _judge(self, peer: PeerId, theirs: Hello) -> Refusal:
        unfit = differences(self._hello(), theirs)
        if unfit:
            logger.warning("peer %s refused: %s", peer_text(peer), "; ".join(unfit))
            return "mismatch"
        if self._offences.is_shunned(peer):
            return "offences"
        if not self._quotas.admit(peer):
            return "busy"
        first = self._visitors.get(peer)
        if first is None:
            return "busy" if len(self._visitors) >= self._max_visitors else ""
        if first.session != theirs.session and await _is_alive(first):
            logger.warning("peer %s refused: another process with its identity is connected", peer_text(peer))
            return "identity"
        first.writer.close()
        return ""

    async def _listen(self, visitor: Visitor, reader: asyncio.StreamReader) -> None:
        while not self._offences.is_shunned(visitor.peer):
            frame = await read_frame(reader, MAX_FRAME_BYTES, visitor.peer)
            self._traffic.down.charge(FRAME_HEAD_BYTES + len(frame))
            kind, number, payload = parse_channel_frame(frame, visitor.peer)
            if kind is Kind.PONG:
                visitor.pong.set()
            elif kind is Kind.MESSAGE:
                await self._start_handler(visitor, number, payload)
            else:
                raise RemoteProtocolError(visitor.peer, f"{kind.name} from the side that opened the channel")

    async def _start_handler(self, visitor: Visitor, number: int, payload: bytes) -> None:
        async with visitor.room:
            await visitor.room.wait_for(lambda: visitor.has_room(len(payload)))
            visitor.num_handled += 1
            visitor.handled_bytes += len(payload)
        task = asyncio.create_task(self._handle(visitor, number, payload))
        self._tasks.add(task)
        task.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._fail(bug)

    async def _handle(self, visitor: Visitor, number: int, payload: bytes) -> None:
        try:
            if self._handler is None:
                write_frame(visitor.writer, channel_head(Kind.REFUSED, number), b"it takes no messages")
                return
            await self._handler(visitor.peer, payload)
            self._traffic.bytes_received += len(payload)
            write_frame(visitor.writer, channel_head(Kind.ACCEPTED, number))
        except RemoteProtocolError as error:
            self._offences.add(visitor.peer, error.reason)
            reason = error.reason.encode()[:MAX_REASON_BYTES]
            write_frame(visitor.writer, channel_head(Kind.REFUSED, number), reason)
        finally:
            async with visitor.room:
                visitor.num_handled -= 1
                visitor.handled_bytes -= len(payload)
                visitor.room.notify_all()


async def _is_alive(visitor: Visitor) -> bool:
    """Whether a peer answers on its open channel within 5 s."""
    visitor.pong.clear()
    write_frame(visitor.writer, channel_head(Kind.PING, 0))
    try:
        async with asyncio.timeout(SIGN_OF_LIFE_TIMEOUT_S):
            await visitor.pong.wait()
    except TimeoutError:
        return False
    return True


def _parse_hello(peer: PeerId, frame: bytes) -> Hello:
    try:
        hello = msgspec.msgpack.decode(frame, type=Hello)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(peer, f"malformed hello: {error}") from error
    lengths_fit = len(hello.session) == SESSION_BYTES and len(hello.run) in (0, DIGEST_BYTES)
    if not lengths_fit or len(hello.addresses) > MAX_ADDRESSES:
        raise RemoteProtocolError(peer, "malformed hello: session, run or addresses of a wrong length")
    return hello
