from __future__ import annotations

import asyncio

import pytest

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.network.wire import Hello, Kind, channel_head, differences, parse_channel_frame, read_frame

PEER = PeerId(b"p" * 32)


def hello(**changes: object) -> Hello:
    plain = {"protocol": 1, "run": bytes(32), "settings": {"model.width": "96", "parts": "8"}, "session": bytes(16)}
    return Hello(**{**plain, "wall_ms": 0, "addresses": (), **changes})


def test_equal_peers_fit() -> None:
    assert differences(hello(), hello(session=b"s" * 16, wall_ms=5)) == ()


def test_every_differing_key_is_named_with_both_values() -> None:
    theirs = hello(protocol=2, run=b"\x01" * 32, settings={"model.width": "128", "extra": "1"})
    assert differences(hello(), theirs) == (
        "protocol version is 1 here, 2 there",
        "run is 0000000000000000 here, 0101010101010101 there",
        "extra is absent here, 1 there",
        "model.width is 96 here, 128 there",
        "parts is 8 here, absent there",
    )


def test_a_node_without_a_run_fits_every_run() -> None:
    assert differences(hello(run=b"", settings={}), hello()) == ()
    assert differences(hello(), hello(run=b"", settings={})) == ()


def test_a_joiner_that_does_not_know_the_settings_yet_fits() -> None:
    assert differences(hello(settings={}), hello()) == ()


def stream(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_a_frame_is_its_length_and_its_bytes() -> None:
    assert await read_frame(stream(b"\0\0\0\3abcd"), 3, PEER) == b"abc"


async def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="4294967295"):
        await read_frame(stream(b"\xff\xff\xff\xff"), 100, PEER)


async def test_a_stream_that_ends_within_a_frame_is_at_its_end() -> None:
    for data in (b"", b"\0\0", b"\0\0\0\3ab"):
        with pytest.raises(EOFError):
            await read_frame(stream(data), 100, PEER)


def test_a_channel_frame_is_taken_apart() -> None:
    frame = channel_head(Kind.MESSAGE, 7) + b"payload"
    assert parse_channel_frame(frame, PEER) == (Kind.MESSAGE, 7, b"payload")


@pytest.mark.parametrize("frame", [b"", b"\x01\0\0\0", b"\x00\0\0\0\0", b"\x63\0\0\0\0"])
def test_a_malformed_channel_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_channel_frame(frame, PEER)
