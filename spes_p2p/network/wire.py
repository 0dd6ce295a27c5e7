"""Frames on a stream, and the small structures that go in them.

A frame is a 4-byte big-endian length and that many bytes. On a message channel these are a kind (1 byte), a sequence
number (4 bytes) and a payload; before the first of them each side has said hello once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

import msgspec

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId

MAX_MESSAGE_BYTES = 4 << 20
MAX_HELLO_BYTES = 64 << 10
MAX_REASON_BYTES = 1024
HEAD_BYTES = 5
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + HEAD_BYTES
MAX_QUESTION_BYTES = 128
MAX_ANSWER_FRAMES = 64
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES
"""Of all frames of an answer together."""
FRAME_HEAD_BYTES = 4
"""The length before each frame."""
_MAX_DIFFERENCES = 8

MESSAGE_STREAM = "spes.message"
BLOB_STREAM = "spes.blob"
QUESTION_STREAM = "spes.question"


class Kind(IntEnum):
    """What a frame on a message channel is."""

    MESSAGE = 1
    """From the side that opened the channel: a payload for the other's handler."""
    ACCEPTED = 2
    """Back: the handler has taken the message of that number."""
    REFUSED = 3
    """Back: the handler would not have it; the payload says why."""
    PING = 4
    """Back: are you still there?"""
    PONG = 5
    """Forth: yes."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame each way. Unknown fields are ignored, so that versions that differ can tell each other so."""

    protocol: int
    run: bytes
    """32 bytes; empty for a node that takes no part in a run."""
    settings: Mapping[str, str]
    """The run's configuration, flat; empty while it is not known yet."""
    session: bytes
    """16 random bytes of this start of the process."""
    wall_ms: int
    """The sender's wall clock in milliseconds, to measure how far the clocks are apart."""
    addresses: tuple[str, ...]
    """Where the sender can be dialled."""


Refusal = Literal["", "mismatch", "identity", "offences", "busy"]


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a hello."""

    hello: Hello
    refusal: Refusal
    """Empty: come in."""


class BlobRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks [first, first + count) of a blob; a count of 0 asks for the list of its chunk hashes."""

    blob: bytes
    first: int
    count: int


class BlobAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Precedes the chunks, or the list, unless there is a problem."""

    size_bytes: int
    problem: Literal["", "absent", "busy", "malformed"]


def differences(mine: Hello, theirs: Hello) -> tuple[str, ...]:
    """What keeps two peers from working together, each with the value here and there; empty: nothing.

    Runs are compared if both take part in one, settings if both know theirs.
    """
    found = []
    if mine.protocol != theirs.protocol:
        found.append(f"protocol version is {mine.protocol} here, {theirs.protocol} there")
    if mine.run and theirs.run:
        if mine.run != theirs.run:
            found.append(f"run is {mine.run.hex()[:16]} here, {theirs.run.hex()[:16]} there")
        if mine.settings and theirs.settings:
            keys = sorted({*mine.settings, *theirs.settings})
            pairs = [(key, mine.settings.get(key, "absent"), theirs.settings.get(key, "absent")) for key in keys]
            found += [f"{key} is {here} here, {there[:80]} there" for key, here, there in pairs if here != there]
    return tuple(found[:_MAX_DIFFERENCES])


async def read_frame(reader: asyncio.StreamReader, max_bytes: int, peer: PeerId) -> bytes:
    """The next frame of `peer`'s. Raises RemoteProtocolError if it is longer than `max_bytes`, EOFError at the end."""
    size = int.from_bytes(await reader.readexactly(FRAME_HEAD_BYTES), "big")
    if size > max_bytes:
        raise RemoteProtocolError(peer, f"frame of {size} bytes, at most {max_bytes} are allowed")
    return await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
    """Queue one frame; the caller drains."""
    writer.write(sum(len(part) for part in parts).to_bytes(FRAME_HEAD_BYTES, "big"))
    for part in parts:
        writer.write(part)


def channel_head(kind: Kind, number: int) -> bytes:
    """The 5 bytes before a payload on a message channel."""
    return bytes((kind,)) + number.to_bytes(4, "big")


def parse_channel_frame(frame: bytes, peer: PeerId) -> tuple[Kind, int, bytes]:
    """(kind, number, payload). Raises RemoteProtocolError if malformed."""
    if len(frame) < HEAD_BYTES or frame[0] not in Kind.__members__.values():
        raise RemoteProtocolError(peer, "malformed channel frame")
    return Kind(frame[0]), int.from_bytes(frame[1:HEAD_BYTES], "big"), frame[HEAD_BYTES:]
