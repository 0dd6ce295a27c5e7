"""Why training is held: one node, several reasons at a time (the user's pause, hours, battery, idle, a budget).

Training goes on when the last reason is gone. What is held is training alone: the node stays a member, votes, serves
blobs, and keeps its leases for as long as the rules allow. `RoundTasks` stops and starts training by this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from spes_p2p.node.snapshot import PAUSE

__all__ = ["PAUSE", "Holds", "Pausable"]


class Pausable(Protocol):
    """Whose training can be held: the running node."""

    def set_hold(self, reason: str, held: bool) -> None:
        """Hold training for `reason`, or no longer for it. Idempotent; from the event loop's thread."""
        ...


class Changes:
    """Wakes everybody who waits, at each change: what an `asyncio.Event` is for one that happens again and again."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Something changed."""
        for waiter in tuple(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next change after this call."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Holds:
    """The reasons that hold training now. Belongs to one event loop."""

    def __init__(self, now_ms: Callable[[], int] = _monotonic_ms) -> None:
        self._now_ms = now_ms
        self._since_ms: dict[str, int] = {}
        self.changed = Changes()
        """`await holds.changed.wait()` returns when a reason has come or gone."""

    def set(self, reason: str, held: bool) -> None:
        """Hold for `reason`, or no longer. What is so already changes nothing, its beginning neither."""
        if held == (reason in self._since_ms):
            return
        if held:
            self._since_ms[reason] = self._now_ms()
        else:
            del self._since_ms[reason]
        self.changed.tell()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why training is held, the oldest reason first; empty: it is not."""
        return tuple(self._since_ms)

    @property
    def held(self) -> bool:
        """Whether any reason holds training."""
        return bool(self._since_ms)

    @property
    def since_ms(self) -> int | None:
        """When the oldest of the present reasons began, on the clock this was made with; None: nothing holds."""
        return min(self._since_ms.values(), default=None)

    async def wait_released(self) -> None:
        """Return when nothing holds training."""
        while self.held:
            await self.changed.wait()
