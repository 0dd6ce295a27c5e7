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

AUTONAT_STREAM = "/libp2p/autonat/1.0.0"
TIMEOUT_S = 30.0
"""The other side tries for 15 s."""
_MAX_ANSWER_BYTES = 4096
_OK, _DIAL_ERROR, _REFUSED = 0, 100, 101
_VARINT, _BYTES = 0, 2

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
    reader, writer = await daemon.open_stream(peer, AUTONAT_STREAM, TIMEOUT_S)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(request)
            await writer.drain()
            return parse_answer(await _read_message(reader))
    except (TimeoutError, OSError, EOFError, ValueError) as error:
        raise TransportError(f"no proper answer to a request to dial back: {error!r}") from error
    finally:
        writer.close()


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
    info = _field(1, peer) + b"".join(_field(2, address) for address in addresses)
    message = bytes((1 << 3 | _VARINT, 0)) + _field(2, _field(1, info))
    return _varint(len(message)) + message


def parse_answer(data: bytes) -> DialBack:
    """What a DIAL_RESPONSE says. Raises ValueError if it is malformed."""
    answer = _fields(data).get(3)
    if not isinstance(answer, bytes):
        raise ValueError("the answer is no dial response")
    fields = _fields(answer)
    status, text, address = fields.get(1, _OK), fields.get(2, b""), fields.get(3, b"")
    words = text.decode(errors="replace")[:200] if isinstance(text, bytes) else ""
    if status == _OK and isinstance(address, bytes) and address:
        return DialBack(verdict="reached", detail=str(Multiaddr(address)))
    if status == _DIAL_ERROR:
        return DialBack(verdict="not reached", detail=words or "no connection could be made")
    return DialBack(verdict="not tried", detail=words or f"status {status!r}")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _fields(data: bytes) -> dict[int, int | bytes]:
    """Field number -> the last value of it, of a protobuf message that has integers and byte strings alone."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(data):
        key, at = _take_varint(data, at)
        value, at = _take_varint(data, at)
        if key & 7 == _VARINT:
            found[key >> 3] = value
        elif key & 7 == _BYTES and at + value <= len(data):
            found[key >> 3] = data[at : at + value]
            at += value
        else:
            raise ValueError("malformed protobuf message")
    return found


def _take_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for place in range(5):
        if at + place >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError("a number is too long")


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    head = bytearray()
    while not head or head[-1] >= 0x80:
        head += await reader.readexactly(1)
        if len(head) > 3:
            raise ValueError("the answer is too long")
    size, _ = _take_varint(bytes(head), 0)
    if size > _MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return await reader.readexactly(size)
