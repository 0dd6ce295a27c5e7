"""What rank 0, the trainer process, says to the processes of the other ranks of its peer: one Join, then orders. The
frames are those of `worker_messages`. Nothing is answered; what a rank has to say when it fails is plain text."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from spes_p2p.training.orders import Order


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Which rank this is, and where it meets the others."""

    index: int
    count: int
    device: str
    meeting_place: str
    """File of the process group's store."""
    threads: int
    memory_bytes: int | None


Message: TypeAlias = Join | Order


def read_message(payload: bytes) -> Message:
    """A frame's payload. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(payload, type=Message)
