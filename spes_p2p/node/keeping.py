"""Which blobs stay on disk: those that a recent round named, and pinned ones. Older ones are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from spes_p2p.ids import Digest

KEEP_ROUNDS = 3
"""The current state and the three before it: late updates name base rows two rounds old, joiners load the previous
state, and whoever hands over is asked for a while."""


class Shelf(Protocol):
    """What the keeper needs of the store."""

    def ids(self) -> Iterable[Digest]:
        """All whole blobs."""
        ...

    def partial_ids(self) -> Iterable[Digest]:
        """All blobs whose fetching has begun and not ended."""
        ...

    def delete(self, blob: Digest) -> None:
        """Forget a blob, and a partial one."""
        ...


class Keeper:
    """Remembers which round named a blob last."""

    def __init__(self, blobs: Shelf, pinned: Iterable[Digest]) -> None:
        self._blobs = blobs
        self._pinned = set(pinned)
        self._last_round: dict[Digest, int] = {}

    def note(self, blobs: Iterable[Digest], round_number: int) -> None:
        """These blobs, here or to come, belong to that round."""
        for blob in blobs:
            self._last_round[blob] = max(round_number, self._last_round.get(blob, 0))

    def pin(self, blobs: Iterable[Digest]) -> None:
        """These blobs stay as long as this process lives."""
        self._pinned.update(blobs)

    async def sweep(self, round_number: int) -> int:
        """Delete what no round since `round_number` - KEEP_ROUNDS named, and what was left half fetched for as long;
        returns how many blobs that were. Raises MachineError if the disk refuses.

        A blob that nobody named, from before the start or left by a trainer that died, counts from its first sweep.
        """
        here = await asyncio.to_thread(lambda: [*self._blobs.ids(), *self._blobs.partial_ids()])
        for blob in here:
            self._last_round.setdefault(blob, round_number)
        num_deleted = 0
        for blob in [blob for blob in self._last_round if self._is_old(blob, round_number)]:
            if self._is_old(blob, round_number):  # it may have been named while others were deleted
                del self._last_round[blob]
                await asyncio.to_thread(self._blobs.delete, blob)
                num_deleted += 1
        return num_deleted

    def _is_old(self, blob: Digest, round_number: int) -> bool:
        last = self._last_round.get(blob, round_number)
        return last < round_number - KEEP_ROUNDS and blob not in self._pinned
