"""`VirtualClock`: time that passes only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class VirtualClock:
    """Satisfies `ports.Clock`. Coroutines may wait on it; a jump wakes them in the order of their instants."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._tickets = itertools.count()
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        """Milliseconds; what the last jump led to."""
        return self._now_ms

    def jump(self, by_ms: int) -> None:
        """Let time pass at once. Raises ValueError for a negative jump."""
        self.jump_to(self._now_ms + by_ms)

    def jump_to(self, at_ms: int) -> None:
        """Go to an instant. Raises ValueError if it has passed."""
        if at_ms < self._now_ms:
            raise ValueError(f"the clock stands at {self._now_ms} ms and cannot go back to {at_ms} ms")
        self._now_ms = at_ms
        while self._sleepers and self._sleepers[0][0] <= at_ms:
            _, _, waiter = heapq.heappop(self._sleepers)
            if not waiter.done():
                waiter.set_result(None)

    def next_wake_ms(self) -> int | None:
        """The instant for which the first sleeper waits, or None."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def sleep_ms(self, duration_ms: int) -> None:
        """Wait until so much virtual time has passed; other tasks run in any case."""
        if duration_ms <= 0:
            await asyncio.sleep(0)
            return
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ms + duration_ms, next(self._tickets), waiter))
        await waiter
