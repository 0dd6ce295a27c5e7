"""The sending half of a message channel: one stream to a peer, opened once, used for all messages to it.

Messages are numbered and many may be under way; each is confirmed once the other side's handler has taken it. The
receiving half is in `reception`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

import msgspec

from spes_p2p.crypto import peer_text
from spes_p2p.errors import IdentityError, RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.scores import Traffic
from spes_p2p.network.wire import (
    FRAME_HEAD_BYTES,
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
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

HANDSHAKE_TIMEOUT_S = 60.0
MAX_UNDER_WAY = 32
SMALL_BYTES = 4096
"""A message up to this size takes about as long as the way there and back."""
_NUM_TIMES = 16

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BrokenChannelError(TransportError):
    """The channel ended before the message was confirmed; a fresh channel may carry it."""


class RefusedPeerError(TransportError):
    """The two peers cannot work together, or the other one will not listen; the message names the reason."""


class UnfitPeerError(RefusedPeerError):
    """The two peers' protocol, run or settings differ: trying again is of no use."""


class Channel:
    """Made by `open_channel`, once both sides have agreed to work together."""

    def __init__(self, peer: PeerId, stream: Stream, welcome: Hello, skew_ms: int, traffic: Traffic) -> None:
        self.peer = peer
        self.their_hello = welcome
        self.skew_ms = skew_ms
        """How far the peer's clock is ahead of ours."""
        self._reader, self._writer = stream
        self._traffic = traffic
        self._unconfirmed: dict[int, asyncio.Future[None]] = {}
        self._next_number = 0
        self._places = asyncio.Semaphore(MAX_UNDER_WAY)
        self._closed = asyncio.Event()
        self._times_ms: deque[float] = deque(maxlen=_NUM_TIMES)
        """From sending a small message to its confirmation, the latest ones."""
        self._listener = asyncio.create_task(self._listen())
        # not at the listener's own end: a task that is cancelled before it has begun never gets there
        self._listener.add_done_callback(lambda task: self._end())

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return not self._closed.is_set()

    @property
    def latency_ms(self) -> float | None:
        """The fastest of the latest confirmations: least of it is the other side's work. None: no message yet."""
        return min(self._times_ms, default=None)

    async def wait_closed(self) -> None:
        """Return once the channel has ended, whichever side ended it."""
        await self._closed.wait()

    async def send(self, data: bytes) -> None:
        """Deliver one message. Raises BrokenChannelError, or TransportError if the other side refuses it."""
        async with self._places:
            if not self.is_open:
                raise BrokenChannelError(f"the channel to {peer_text(self.peer)} has ended")
            await self._traffic.up.message(FRAME_HEAD_BYTES + HEAD_BYTES + len(data))
            if not self.is_open:
                raise BrokenChannelError(f"the channel to {peer_text(self.peer)} has ended")
            number = self._next_number
            self._next_number = (number + 1) % (1 << 32)
            confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unconfirmed[number] = confirmed
            began_s = time.monotonic()
            try:
                write_frame(self._writer, channel_head(Kind.MESSAGE, number), data)
                await self._writer.drain()
                await confirmed
            except OSError as error:
                raise BrokenChannelError(f"the channel to {peer_text(self.peer)} broke") from error
            finally:
                self._unconfirmed.pop(number, None)
                confirmed.cancel()
            if len(data) <= SMALL_BYTES:
                self._times_ms.append((time.monotonic() - began_s) * 1000)
            self._traffic.bytes_sent += len(data)

    async def close(self) -> None:
        """End the channel."""
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    async def _listen(self) -> None:
        """Take confirmations until the stream ends."""
        try:
            while True:
                kind, number, payload = parse_channel_frame(
                    await read_frame(self._reader, MAX_FRAME_BYTES, self.peer), self.peer
                )
                if kind is Kind.PING:
                    write_frame(self._writer, channel_head(Kind.PONG, number))
                    await self._writer.drain()
                    continue
                confirmed = self._unconfirmed.get(number)
                if confirmed is None or confirmed.done():
                    continue  # the sender has stopped waiting
                if kind is Kind.ACCEPTED:
                    confirmed.set_result(None)
                else:
                    reason = payload.decode(errors="replace")
                    confirmed.set_exception(TransportError(f"{peer_text(self.peer)} refused the message: {reason}"))
        except (OSError, EOFError, RemoteProtocolError):
            pass  # the stream is of no more use: who waits is told at the end

    def _end(self) -> None:
        self._closed.set()
        self._writer.close()
        for confirmed in self._unconfirmed.values():
            if not confirmed.done():
                confirmed.set_exception(BrokenChannelError(f"the channel to {peer_text(self.peer)} broke"))


async def open_channel(peer: PeerId, stream: Stream, mine: Hello, traffic: Traffic) -> Channel:
    """Say hello on a fresh stream.

    Raises UnfitPeerError or RefusedPeerError if the other side will not have us, IdentityError if it already talks with
    a process that has our identity, and TransportError if there is no proper answer within 60 s.
    """
    reader, writer = stream
    with contextlib.ExitStack() as undo:
        undo.callback(writer.close)
        asked_at_s = time.time()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                write_frame(writer, msgspec.msgpack.encode(mine))
                await writer.drain()
                answer = await read_frame(reader, 2 * MAX_HELLO_BYTES, peer)
            welcome = msgspec.msgpack.decode(answer, type=Welcome)
        except (OSError, EOFError, TimeoutError, RemoteProtocolError, msgspec.DecodeError) as error:
            raise TransportError(f"{peer_text(peer)} gave no proper answer to hello: {error!r}") from error
        _check_welcome(peer, mine, welcome)
        skew_ms = welcome.hello.wall_ms - int((asked_at_s + time.time()) * 500)
        undo.pop_all()
    return Channel(peer, stream, welcome.hello, skew_ms, traffic)


_REFUSALS: dict[Refusal, str] = {
    "offences": "it does not listen to this node for a while, after too many messages that break the rules",
    "busy": "it has no room for another peer",
}


def _check_welcome(peer: PeerId, mine: Hello, welcome: Welcome) -> None:
    if welcome.refusal == "identity":
        raise IdentityError(
            f"identity in use: {peer_text(peer)} is connected to another process with this node's key\n"
            "Stop that process, or give this node an identity of its own (a data folder without identity.key)."
        )
    unfit = differences(mine, welcome.hello)
    if unfit or welcome.refusal == "mismatch":
        reason = "; ".join(unfit) or "it finds that the two do not fit"
        raise UnfitPeerError(f"cannot work with {peer_text(peer)}: {reason}")
    if welcome.refusal:
        raise RefusedPeerError(f"refused by {peer_text(peer)}: {_REFUSALS[welcome.refusal]}")
