"""Which chunks of one blob are still to be fetched, shared by the sources that are drawn from at once.

A range that a source failed to deliver goes back, so that another source takes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise

from spes_p2p.digests import blob_id_of_chunks, num_chunks
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest
from spes_p2p.ports import BlobStore, PartialBlob

RANGE_CHUNKS = 8


class Assembly:
    """One blob on its way into the store."""

    def __init__(self, blobs: BlobStore, blob: Digest, max_bytes: int) -> None:
        self.blob = blob
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._partial: PartialBlob | None = None
        self._ranges: deque[tuple[int, int]] = deque()
        self._num_taken = 0
        self._changed = asyncio.Condition()
        self.size_bytes = 0

    @property
    def is_planned(self) -> bool:
        """Whether the chunk list is known."""
        return self._partial is not None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is here."""
        return self.is_planned and not self._ranges and not self._num_taken

    @property
    def num_ranges(self) -> int:
        """Ranges that nobody has taken."""
        return len(self._ranges)

    async def plan(self, size_bytes: int, chunks: tuple[Digest, ...]) -> None:
        """Begin, or resume, with a source's chunk list; nothing if that has happened.

        Raises BlobError if the list is not the blob's, and TooLargeError if the blob is above the caller's limit.
        """
        if len(chunks) != num_chunks(size_bytes) or blob_id_of_chunks(size_bytes, chunks) != self.blob:
            raise BlobError("sent a chunk list of another blob")
        if size_bytes > self._max_bytes:
            raise TooLargeError(
                f"blob {self.blob.hex()[:16]} has {size_bytes} bytes, at most {self._max_bytes} are wanted"
            )
        async with self._changed:
            if self._partial is not None:
                return
            partial = await asyncio.to_thread(self._blobs.partial, self.blob, size_bytes, chunks)
            self._ranges.extend(ranges(await asyncio.to_thread(partial.missing)))
            self.size_bytes = size_bytes
            self._partial = partial
            self._changed.notify_all()

    async def wait_planned(self) -> None:
        """Return once the chunk list is known."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_planned)

    async def take(self) -> tuple[int, int] | None:
        """The next [start, stop) of chunks to fetch; None once all are here. Waits while others hold the last ones."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ranges or not self._num_taken)
            if not self._ranges:
                return None
            self._num_taken += 1
            return self._ranges.popleft()

    async def give_back(self, start: int, stop: int) -> None:
        """End what `take` began; [start, stop) is the part that was not fetched, empty if all was."""
        async with self._changed:
            self._num_taken -= 1
            if start < stop:
                self._ranges.appendleft((start, stop))
            self._changed.notify_all()

    async def write(self, index: int, chunk: bytes) -> None:
        """Add a chunk. Raises BlobError if it is not the listed one."""
        if self._partial is not None:
            await asyncio.to_thread(self._partial.write, index, chunk)

    async def finish(self) -> None:
        """Make the blob visible. Raises BlobError if a chunk is missing."""
        if self._partial is not None:
            await asyncio.to_thread(self._partial.finish)


class TooLargeError(BlobError):
    """The blob is larger than the caller wants, whoever serves it."""


def ranges(missing: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending indices as ranges [start, stop) without gaps, at most RANGE_CHUNKS long."""
    if not missing:
        return []
    starts = [missing[0], *(after for before, after in pairwise(missing) if after != before + 1)]
    stops = [*(before + 1 for before, after in pairwise(missing) if after != before + 1), missing[-1] + 1]
    return [
        (at, min(at + RANGE_CHUNKS, stop))
        for start, stop in zip(starts, stops, strict=True)
        for at in range(start, stop, RANGE_CHUNKS)
    ]
