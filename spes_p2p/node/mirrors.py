"""Where blobs of a state may still be had when no member gives them: bootstrap nodes with a mirror.

Whether one has a mirror is found out by asking. It is asked last and seldom: one that is down must delay nothing.
"""

from __future__ import annotations

from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.fetching import Fetcher
from spes_p2p.ports import Clock

PAUSE_MS = 30_000
"""Between two attempts for one blob."""
_MAX_REMEMBERED = 4096


class Mirrors:
    """Brings blobs from bootstrap nodes."""

    def __init__(self, fetcher: Fetcher, entries: tuple[PeerId, ...], clock: Clock) -> None:
        self._fetcher = fetcher
        self._entries = entries
        self._clock = clock
        self._tried_at_ms: dict[Digest, int] = {}

    async def bring(self, blob: Digest, max_bytes: int) -> bool:
        """Whether one of them gave the blob; False at once if that was tried just before. Raises MachineError."""
        now_ms = self._clock.now_ms()
        tried_at_ms = self._tried_at_ms.pop(blob, None)
        is_too_soon = tried_at_ms is not None and now_ms - tried_at_ms < PAUSE_MS
        if not self._entries or is_too_soon:
            if tried_at_ms is not None:
                self._tried_at_ms[blob] = tried_at_ms
            return False
        if len(self._tried_at_ms) >= _MAX_REMEMBERED:
            del self._tried_at_ms[next(iter(self._tried_at_ms))]
        self._tried_at_ms[blob] = now_ms
        try:
            await self._fetcher.fetch(blob, self._entries, max_bytes)
        except BlobError:
            return False
        return True
