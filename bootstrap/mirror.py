"""The optional mirror: the blobs of the runs' newest states, within a disk cap. Without a cap there are none.

What belongs to no newest state any more is deleted once its successor is here, or earlier if there is no room for both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.storage.blobs import DiskBlobs

logger = logging.getLogger(__name__)


class Fetcher(Protocol):
    """What brings blobs: the transport."""

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob of at most `max_bytes` into the store. Raises BlobError, MachineError."""
        ...


class Mirror:
    """Keeps the blobs of several runs; `wanted` says which."""

    def __init__(self, blobs: DiskBlobs, fetcher: Fetcher, cap_bytes: int) -> None:
        self._blobs = blobs
        self._fetcher = fetcher
        self._cap_bytes = cap_bytes
        self._wanted: dict[RunId, tuple[Digest, ...]] = {}
        self._before: dict[RunId, tuple[Digest, ...]] = {}
        """Sets that are being replaced."""
        self._lock = asyncio.Lock()
        self._told_full = False
        self.size_bytes = 0

    async def begin(self, wanted: dict[RunId, tuple[Digest, ...]]) -> None:
        """Say what an earlier start may have left; the rest of the store is deleted."""
        self._wanted = dict(wanted) if self._cap_bytes else {}
        await self._sweep()

    async def follow(self, run: RunId, wanted: tuple[Digest, ...], sources: Sequence[PeerId]) -> None:
        """Bring what a run's newest state needs, as far as there is room. Raises MachineError."""
        if not self._cap_bytes:
            return
        async with self._lock:
            before = self._wanted.get(run, ())
            if wanted != before:
                self._wanted[run], self._before[run] = wanted, (*self._before.get(run, ()), *before)
            missing = [blob for blob in wanted if not self._blobs.has(blob)]
            for blob in missing:
                if not await self._bring(blob, sources):
                    break
            if all(self._blobs.has(blob) for blob in wanted):
                self._before.pop(run, None)
                await self._sweep()

    async def drop(self, run: RunId) -> None:
        """Forget a run."""
        async with self._lock:
            self._wanted.pop(run, None)
            self._before.pop(run, None)
            await self._sweep()

    async def _bring(self, blob: Digest, sources: Sequence[PeerId]) -> bool:
        """False if there is no use in trying the next one."""
        if self._room() <= 0:
            self._before.clear()
            await self._sweep()
        if self._room() <= 0:
            if not self._told_full:
                logger.warning("the mirror is full (%d bytes): what does not fit is not mirrored", self._cap_bytes)
            self._told_full = True
            return False
        try:
            await self._fetcher.fetch(blob, sources, self._room())
        except BlobError as error:
            logger.debug("not mirrored: %s", error)
            return True
        self._told_full = False
        self.size_bytes += self._blobs.size_bytes(blob)
        return True

    def _room(self) -> int:
        return self._cap_bytes - self.size_bytes

    async def _sweep(self) -> None:
        kept = {blob for wanted in (*self._wanted.values(), *self._before.values()) for blob in wanted}
        await asyncio.to_thread(self._delete_all_but, kept)
        self.size_bytes = await asyncio.to_thread(lambda: sum(map(self._blobs.size_bytes, self._blobs.ids())))

    def _delete_all_but(self, kept: set[Digest]) -> None:
        for blob in (*self._blobs.ids(), *self._blobs.partial_ids()):
            if blob not in kept:
                self._blobs.delete(blob)
