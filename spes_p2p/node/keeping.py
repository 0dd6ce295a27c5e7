"""Which blobs stay on disk: those that a recent round named. Older ones are deleted."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.ids import Digest
from spes_p2p.ports import BlobStore

KEEP_ROUNDS = 3
"""The current state and the two before it: late updates name their base rows, joiners may be two rounds behind."""


class Keeper:
    """Remembers which round named a blob last."""

    def __init__(self, blobs: BlobStore, pinned: Iterable[Digest], round_number: int) -> None:
        self._blobs = blobs
        self._pinned = frozenset(pinned)
        # nothing says when a blob from before the start was used last, so it gets the full time
        self._last_round = dict.fromkeys(blobs.ids(), round_number)

    def note(self, blobs: Iterable[Digest], round_number: int) -> None:
        """These blobs belong to that round."""
        for blob in blobs:
            self._last_round[blob] = max(round_number, self._last_round.get(blob, 0))

    def sweep(self, round_number: int) -> int:
        """Delete what no round since `round_number` - KEEP_ROUNDS named; returns how many blobs that were."""
        old = [
            blob
            for blob, last in self._last_round.items()
            if last < round_number - KEEP_ROUNDS and blob not in self._pinned
        ]
        for blob in old:
            del self._last_round[blob]
            self._blobs.delete(blob)
        return len(old)
