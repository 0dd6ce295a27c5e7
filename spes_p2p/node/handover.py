"""Handing over in a leave: the index blob, with one blob of masters and moments per shard, and its taking over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from spes_p2p.digests import DIGEST_BYTES
from spes_p2p.errors import BlobError, SchemaError, TrainerError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.fetching import Holdings
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head

MAX_INDEX_BYTES = 1 << 20
_BLOBS_PER_SHARD = 8
"""A hand-over has three fp32 tensors for each one of the blob, which has at least bf16: six times its bytes."""
_EXTRA_BYTES = 1 << 16
_EXTRA_S = 10.0
"""For asking and answering, besides the bytes at the run's minimum rate."""


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
    if any(len(entry.blob) != DIGEST_BYTES or entry.size_bytes < 0 for entry in entries):
        raise SchemaError("hand-over index: malformed entry")
    return {entry.shard: (entry.blob, entry.size_bytes) for entry in entries}


class Heir(Protocol):
    """Who goes on with masters and moments."""

    async def take_over(self, shard: int, blob: Digest) -> None:
        """Load what a leaver handed over; a refusal is told, not raised. Raises TrainerError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    leaver: PeerId
    round: int
    index: Digest
    new_shards: tuple[int, ...]
    """Shards that the leaver left and that are new to this peer. A co-owner that stays needs nothing of them."""


class Successions:
    """What leavers handed over to this peer."""

    def __init__(self, peer: PeerId, holdings: Holdings, notify: Callable[[str, str], None]) -> None:
        self._peer = peer
        self._holdings = holdings
        self._notify = notify
        self._waiting: list[_Waiting] = []

    def adopted(self, before: Head, effect: fx.Adopt) -> None:
        """Note the hand-overs of a certificate for shards that are this peer's now."""
        mine, had = (set(head.state.shards_of(self._peer)) for head in (effect.head, before))
        for leaver, index, _ in effect.handovers:
            left = set(before.state.shards_of(leaver)) & mine
            if leaver != self._peer and left:
                new_shards = tuple(sorted(left - had))
                self._waiting.append(
                    _Waiting(leaver=leaver, round=effect.head.round, index=index, new_shards=new_shards)
                )

    async def take(self, heir: Heir, head: Head) -> list[fx.HandoverTaken]:
        """Import what was noted, right after the start of the round was loaded; returns what each leaver may be told.

        What does not come in time, or is refused, is done without: the certified values and fresh moments serve.
        """
        waiting, self._waiting = self._waiting, []
        for succession in waiting:
            try:
                await self._import(heir, succession, head)
            except (BlobError, SchemaError, TrainerError) as error:
                self._notify("warning", f"a hand-over could not be taken: {error}")
            except TimeoutError:
                self._notify("warning", "a hand-over did not come in time: its shards go on with fresh moments")
        return [
            fx.HandoverTaken(leaver=succession.leaver, round=succession.round, handover=succession.index)
            for succession in waiting
        ]

    async def _import(self, heir: Heir, succession: _Waiting, head: Head) -> None:
        shards = [shard for shard in succession.new_shards if self._peer in head.state.owners(shard)]
        if not shards:
            return
        holdings, sources, most_bytes = self._holdings, (succession.leaver,), _most_bytes(head)
        async with asyncio.timeout(fetch_s(head, len(shards))):
            await holdings.fetcher.fetch(succession.index, sources, MAX_INDEX_BYTES)
            handed = decode_index(holdings.blobs.read(succession.index))
            holdings.keeper.note([succession.index], head.round)
            taken = [(shard, handed[shard][0]) for shard in shards if shard in handed]
            for _, blob in taken:
                await holdings.fetcher.fetch(blob, sources, most_bytes)
                holdings.keeper.note([blob], head.round)
        for shard, blob in taken:
            await heir.take_over(shard, blob)


def fetch_s(head: Head, num_shards: int) -> float:
    """Seconds within which a new owner fetches the hand-over of so many shards, or does without."""
    return _EXTRA_S + num_shards * _most_bytes(head) / head.run.config.protocol.min_rate_bytes_per_s


def _most_bytes(head: Head) -> int:
    """Upper bound of one shard's hand-over."""
    return _BLOBS_PER_SHARD * head.run.sizes.expert_blob_bytes + _EXTRA_BYTES
