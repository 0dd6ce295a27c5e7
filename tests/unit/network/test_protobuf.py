"""Protobuf as libp2p's own protocols use it."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.network.protobuf import (
    MAX_FRAMED_BYTES,
    bytes_field,
    fields_of,
    framed,
    integer_field,
    read_framed,
    varint,
)


async def read(data: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_framed(reader)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63, 2**64 - 1])
def test_a_field_comes_back_as_it_was(number: int) -> None:
    assert fields_of(integer_field(3, number) + bytes_field(20, b"data")) == {3: number, 20: b"data"}


def test_a_number_has_seven_bits_a_byte() -> None:
    assert varint(300) == b"\xac\x02"


@pytest.mark.parametrize("data", [b"\x80", b"\xff" * 11, b"\x08", b"\x0a\x05ab", b"\x0d\x00\x00\x00\x00"])
def test_a_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        fields_of(data)


async def test_a_framed_message_is_read_to_its_end_and_no_further() -> None:
    for size in (0, 1, 200, MAX_FRAMED_BYTES):
        assert await read(framed(bytes(size)) + b"rest") == bytes(size)


async def test_a_message_that_is_too_long_is_not_read() -> None:
    for head in (varint(MAX_FRAMED_BYTES + 1), b"\xff\xff\xff\xff"):
        with pytest.raises(ValueError):
            await read(head + bytes(2 * MAX_FRAMED_BYTES))
    with pytest.raises(EOFError):
        await read(framed(b"whole")[:-1])
