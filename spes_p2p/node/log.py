"""The node's log for people: the last lines, and a way to wait for more."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from typing import Literal

from spes_p2p.node.snapshot import LogEvent

KEPT = 1000

_LEVELS: dict[str, Literal["info", "warning", "error"]] = {"info": "info", "warning": "warning", "error": "error"}


class NodeLog:
    """Numbered lines; the last 1000 are kept."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._events: deque[LogEvent] = deque(maxlen=KEPT)
        self._number = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def tell(self, level: str, text: str) -> None:
        """Add a line."""
        self._number += 1
        at_ms = int((time.monotonic() - self._began_s) * 1000)
        self._events.append(LogEvent(number=self._number, at_ms=at_ms, level=_LEVELS.get(level, "info"), text=text))
        self.changed()

    def changed(self) -> None:
        """Wake whoever waits: something else than a line is new."""
        for waiter in tuple(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def after(self, number: int) -> tuple[LogEvent, ...]:
        """Lines above that number, oldest first."""
        return tuple(event for event in self._events if event.number > number)

    async def wait(self, after: int, timeout_s: float) -> None:
        """Return when there is a line above `after` or something changed, at the latest after the time."""
        if self._number > after:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)


class LogBridge(logging.Handler):
    """Shows warnings of this package's loggers to people too, from whatever thread. Made in the event loop's."""

    def __init__(self, log: NodeLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """One record."""
        level = "error" if record.levelno >= logging.ERROR else "warning"
        if threading.get_ident() == self._thread:
            self._log.tell(level, record.getMessage())
        else:
            self._loop.call_soon_threadsafe(self._log.tell, level, record.getMessage())
