"""Asking a peer to dial this node back, by libp2p's AutoNAT (v1), which bootstrap nodes and other peers serve.

    -> Message{type: DIAL, dial: {peer: {id, addrs}}}          each with its length before it, as a varint
    <- Message{type: DIAL_RESPONSE, dialResponse: {status, statusText, addr}}

https://github.com/libp2p/specs/blob/master/autonat/README.md. The other side dials nothing but the address that it
sees this node at, and refuses if that is a private one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from multiaddr import Multiaddr  # type: ignore[import-untyped]  # ships no types

from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import parse_peer_address
from spes_p2p.network.p2p import RELAY_STREAM, Daemon, libp2p_id
from spes_p2p.network.protobuf import bytes_field, fields_of, framed, integer_field, read_framed

AUTONAT_STREAM = "/libp2p/autonat/1.0.0"
TIMEOUT_S = 30.0
"""The other side tries for 15 s."""
_DIAL = 0
_OK, _DIAL_ERROR = 0, 100

Verdict = Literal["reached", "not reached", "not tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """What came of it."""

    verdict: Verdict
    detail: str
    """Where this node was reached, or the other side's reason."""


async def dial_back(daemon: Daemon, peer: PeerId) -> DialBack:
    """Have a connected peer dial this node. Raises TransportError if it does not offer that, or gives no answer."""
    own = [parse_peer_address(text) for text in await daemon.addresses()]
    me = libp2p_id(peer_from_text(str(daemon.peer_id))).to_bytes()
    request = dial_request(me, [Multiaddr(address.route).to_bytes() for address in own])

    async def read(reader: asyncio.StreamReader) -> DialBack:
        return parse_answer(await read_framed(reader))

    failure = "no proper answer to a request to dial back"
    return await daemon.exchange(peer, AUTONAT_STREAM, request, read, TIMEOUT_S, failure)


async def offers_relay(daemon: Daemon, peer: PeerId) -> bool:
    """Whether a connected peer answers to the protocol that asks for relaying."""
    try:
        _, writer = await daemon.open_stream(peer, RELAY_STREAM, TIMEOUT_S)
    except TransportError:
        return False
    writer.close()
    return True


def dial_request(peer: bytes, addresses: list[bytes]) -> bytes:
    """The framed message that asks for a dial. `peer`: libp2p's bytes of an id; `addresses`: multiaddresses."""
    info = bytes_field(1, peer) + b"".join(bytes_field(2, address) for address in addresses)
    return framed(integer_field(1, _DIAL) + bytes_field(2, bytes_field(1, info)))


def parse_answer(data: bytes) -> DialBack:
    """What a DIAL_RESPONSE says. Raises ValueError if it is malformed."""
    answer = fields_of(data).get(3)
    if not isinstance(answer, bytes):
        raise ValueError("the answer is no dial response")
    fields = fields_of(answer)
    status, text, address = fields.get(1, _OK), fields.get(2, b""), fields.get(3, b"")
    words = text.decode(errors="replace")[:200] if isinstance(text, bytes) else ""
    if status == _OK and isinstance(address, bytes) and address:
        return DialBack(verdict="reached", detail=str(Multiaddr(address)))
    if status == _DIAL_ERROR:
        return DialBack(verdict="not reached", detail=words or "no connection could be made")
    return DialBack(verdict="not tried", detail=words or f"status {status!r}")
