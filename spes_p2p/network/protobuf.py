"""The little of protobuf that libp2p's own protocols need: messages of integers and byte strings, framed by a varint.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import asyncio

MAX_FRAMED_BYTES = 4096
"""libp2p's own limit for the messages that are read here."""
_MAX_VARINT_BYTES = 10
_VARINT, _BYTES = 0, 2


def varint(number: int) -> bytes:
    """A whole number >= 0, seven bits a byte."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def integer_field(number: int, value: int) -> bytes:
    """Field `number` with a whole number >= 0."""
    return varint(number << 3 | _VARINT) + varint(value)


def bytes_field(number: int, data: bytes) -> bytes:
    """Field `number` with bytes, or a message."""
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return varint(len(message)) + message


def fields_of(data: bytes) -> dict[int, int | bytes]:
    """Field number -> the last value of it, of a message that has integers and byte strings alone.

    Raises ValueError if it is malformed.
    """
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


async def read_framed(reader: asyncio.StreamReader) -> bytes:
    """The next message, at most 4 KiB. Raises ValueError for a longer one, EOFError if it is cut off."""
    head = bytearray()
    while not head or head[-1] >= 0x80:
        head += await reader.readexactly(1)
        if len(head) > 3:
            raise ValueError("the answer is too long")
    size, _ = _take_varint(bytes(head), 0)
    if size > MAX_FRAMED_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return await reader.readexactly(size)


def _take_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError("a number is too long")
