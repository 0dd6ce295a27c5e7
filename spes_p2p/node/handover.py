"""The hand-over blob of a leave: an index of one blob per shard."""

from __future__ import annotations

import msgspec

from spes_p2p.errors import SchemaError
from spes_p2p.ids import Digest

MAX_INDEX_BYTES = 1 << 20


class HandedShard(msgspec.Struct, frozen=True, array_like=True):
    """Where the masters and moments of one shard are."""

    shard: int
    blob: Digest
    size_bytes: int


def encode_index(shards: dict[int, tuple[Digest, int]]) -> bytes:
    """The index blob."""
    return msgspec.msgpack.encode([HandedShard(shard, *shards[shard]) for shard in sorted(shards)])


def decode_index(data: bytes | memoryview) -> dict[int, tuple[Digest, int]]:
    """Inverse of `encode_index`. Raises SchemaError for anything else."""
    try:
        entries = msgspec.msgpack.decode(data, type=list[HandedShard])
    except msgspec.MsgspecError as error:
        raise SchemaError(f"hand-over index: {error}") from error
    if any(len(entry.blob) != 32 or entry.size_bytes < 0 for entry in entries):
        raise SchemaError("hand-over index: malformed entry")
    return {entry.shard: (entry.blob, entry.size_bytes) for entry in entries}
