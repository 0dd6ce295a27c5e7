"""A relay that keeps to our limits: started, asked what it allows, and started again while chance gave it others.

libp2p's daemon makes two relays for one protocol, `/libp2p/circuit/relay/0.2.0/hop`, and whichever registers last
answers. One is asked for by -relayService=1: its limits are ours and it counts what it passes on. It registers in a
goroutine that a word on reachability wakes, which -forceReachabilityPublic=1 has said near the end of libp2p's start.
The other one (the daemon's `EnableRelayV2`, which no flag turns off) has libp2p's limits of 128 KiB and 2 minutes, and
registers a moment later in the goroutine that did the start. So the first wins where the waking takes longer than what
is left of the start. With one thread for Go code (GOMAXPROCS=1) the woken goroutine waits until the other one pauses,
and that is after its registration, unless Go's scheduler interrupts it just there. Hence the question, and more tries.

    -> HopMessage{type: RESERVE}                                    each with its length before it, as a varint
    <- HopMessage{type: STATUS, reservation, limit: {duration, data}, status: OK}

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. The question comes from a second daemon on loopback,
which the relay dials itself: so it does not matter where the relay listens and what it announces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import parse_peer_address
from spes_p2p.network.p2p import RELAY_LIMITS, RELAY_STREAM, Daemon, DaemonOptions, RelayLimits
from spes_p2p.network.protobuf import fields_of, framed, integer_field, read_framed

MAX_STARTS = 10
MAX_QUESTIONS = 2
"""To one relay: the first may go to a connection of the start before, whose end has not been noticed yet."""
TIMEOUT_S = 10.0
"""For each step of the question, all of them on loopback."""
_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_PING_STREAM = "/ipfs/ping/1.0.0"
_PING_BYTES = 32
_TYPE, _LIMIT, _STATUS = 1, 4, 5
_RESERVE = 0
_DURATION, _DATA = 1, 2
_STATUS_OK = 100

logger = logging.getLogger(__name__)


async def start_relay(options: DaemonOptions) -> tuple[Daemon, RelayLimits | None]:
    """Start a daemon that relays, and say what it allows: RELAY_LIMITS, or other limits after MAX_STARTS tries.

    None if it gives no answer; it is kept then, as it is. Both are logged. Raises MachineError as `Daemon.start` does.
    Nothing else is left running, and nothing at all if this fails or is cancelled.
    """
    async with contextlib.AsyncExitStack() as undo:
        async with _stranger() as stranger:
            for num_left in reversed(range(MAX_STARTS)):
                daemon = await Daemon.start(options)
                undo.push_async_callback(daemon.stop)
                limits = await _limits_if_told(daemon, stranger)
                if limits in (RELAY_LIMITS, None) or not num_left:
                    break
                logger.info("the network daemon came up with its other relay, and is started again")
                await undo.aclose()
        undo.pop_all()
    if limits is not None and limits != RELAY_LIMITS:
        logger.warning(
            "in %d starts the network daemon came up with its other relay: a connection through this node may pass on"
            " %d KiB instead of %d MiB; stop the node and start it again",
            *(MAX_STARTS, limits.num_bytes >> 10, RELAY_LIMITS.num_bytes >> 20),
        )
    return daemon, limits


@contextlib.asynccontextmanager
async def _stranger() -> AsyncIterator[Daemon]:
    daemon = await Daemon.start(DaemonOptions(identity_path=None, listen=(_LOOPBACK,)))
    try:
        yield daemon
    finally:
        await daemon.stop()


async def _limits_if_told(relay: Daemon, stranger: Daemon) -> RelayLimits | None:
    reasons = []
    for _ in range(MAX_QUESTIONS):
        try:
            return await limits_of(relay, stranger)
        except TransportError as error:
            reasons.append(str(error))
    logger.warning("what this node relays cannot be found out: %s", reasons[-1])
    return None


async def limits_of(relay: Daemon, stranger: Daemon) -> RelayLimits:
    """What a daemon of ours allows as a relay, as a stranger on loopback learns it. Raises TransportError.

    It takes one of the relay's places, for as long as the relay keeps one.
    """
    address = parse_peer_address((await stranger.addresses())[0])
    await relay.dial(address.peer, [address.route], TIMEOUT_S)
    await _ping(relay, address.peer)
    return await reserve(stranger, peer_from_text(str(relay.peer_id)))


async def reserve(daemon: Daemon, relay: PeerId) -> RelayLimits:
    """Have a connected peer promise to relay, and say within what. Raises TransportError if it does not."""

    async def read(reader: asyncio.StreamReader) -> RelayLimits:
        return parse_reservation(await read_framed(reader))

    failure = "no proper answer to a request for relaying"
    return await daemon.exchange(relay, RELAY_STREAM, reservation_request(), read, TIMEOUT_S, failure)


def reservation_request() -> bytes:
    """The framed message that asks for a place."""
    return framed(integer_field(_TYPE, _RESERVE))


def parse_reservation(data: bytes) -> RelayLimits:
    """The limits in an answer to it. Raises ValueError if it is malformed, or no."""
    answer = fields_of(data)
    if answer.get(_STATUS) != _STATUS_OK:
        raise ValueError(f"refused with status {answer.get(_STATUS)!r}")
    limit = answer.get(_LIMIT)
    fields = fields_of(limit) if isinstance(limit, bytes) else {}
    num_bytes, duration_s = fields.get(_DATA), fields.get(_DURATION)
    if not isinstance(num_bytes, int) or not isinstance(duration_s, int):
        raise ValueError("it names no limits")
    return RelayLimits(num_bytes=num_bytes, duration_s=duration_s)


async def _ping(daemon: Daemon, peer: PeerId) -> None:
    """Return once the peer, too, knows that they are connected. Raises TransportError."""

    async def read(reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(_PING_BYTES)

    await daemon.exchange(peer, _PING_STREAM, os.urandom(_PING_BYTES), read, TIMEOUT_S, "no answer to a ping")
