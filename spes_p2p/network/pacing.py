"""How fast bytes may pass in one direction: a token bucket, and the queue of those who wait for it.

Whoever passes needs a bucket that is not in debt, and may then take more than is in it: the next one waits until the
debt is paid. So over any `window` seconds at most

    rate * window + rate * DEPTH_S + the last one's bytes

pass. Messages go before blobs, each in the order of their coming. Blobs pass in slices of SLICE_S, so that a message
waits for no more than that beside the messages before it. What came in unasked is charged afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable

DEPTH_S = 0.25
"""Of the rate: what may be saved up while nobody passes. Makes good for a loop that wakes late."""
SLICE_S = 0.05
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 1 << 10, 64 << 10
_MESSAGE, _BLOB = 0, 1


class Bucket:
    """Pure: the time is given. Its level is in bytes and may be negative, a debt."""

    def __init__(self, rate_bytes_per_s: float, now_s: float, debt_bytes: float = 0.0) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._level = -debt_bytes if debt_bytes else rate_bytes_per_s * DEPTH_S
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Until the next one may pass; 0: now."""
        self._fill(now_s)
        return max(0.0, -self._level / self.rate_bytes_per_s)

    def take(self, num_bytes: int, now_s: float) -> None:
        """These bytes pass."""
        self._fill(now_s)
        self._level -= num_bytes

    def debt_bytes(self, now_s: float) -> float:
        """What has passed and is not yet paid."""
        self._fill(now_s)
        return max(0.0, -self._level)

    def _fill(self, now_s: float) -> None:
        elapsed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self._level = min(self._level + elapsed_s * self.rate_bytes_per_s, self.rate_bytes_per_s * DEPTH_S)


class Gate:
    """One direction of a node's line. Counts what passes, and makes it wait where a rate is set. Of one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._bucket: Bucket | None = None
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """Heap of (message or blob, number, bytes, who waits)."""
        self._next_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0
        """Passed since the start: messages, answers and blobs, with the heads of their frames."""

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The limit; None: there is none."""
        return self._bucket.rate_bytes_per_s if self._bucket is not None else None

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Limit the rate from now on, for those who wait too; None: no limit. A debt stays."""
        now_s, before = self._now_s(), self._bucket
        if rate_bytes_per_s is None:
            self._bucket = None
        elif before is None or before.rate_bytes_per_s != rate_bytes_per_s:
            debt_bytes = before.debt_bytes(now_s) if before is not None else 0.0
            self._bucket = Bucket(rate_bytes_per_s, now_s, debt_bytes)
        self._let_pass()

    def slice_bytes(self, whole: int) -> int:
        """How much of `whole` bytes of a blob may ask to pass at once."""
        if self._bucket is None:
            return whole
        share = int(self._bucket.rate_bytes_per_s * SLICE_S)
        return min(whole, MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, share))

    def charge(self, num_bytes: int) -> None:
        """These bytes have passed without asking; blobs wait for them."""
        self.num_bytes += num_bytes
        if self._bucket is not None:
            self._bucket.take(num_bytes, self._now_s())

    async def message(self, num_bytes: int) -> None:
        """Return when so many bytes of a message may pass: before all blobs."""
        await self._pass(_MESSAGE, num_bytes)

    async def blob(self, num_bytes: int) -> None:
        """Return when so many bytes of a blob, a slice, may pass."""
        await self._pass(_BLOB, num_bytes)

    async def _pass(self, urgency: int, num_bytes: int) -> None:
        if not self._waiting and self._may_pass():
            self.charge(num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, self._next_number, num_bytes, turn))
        self._next_number += 1
        self._let_pass()
        await turn

    def _may_pass(self) -> bool:
        return self._bucket is None or self._bucket.wait_s(self._now_s()) <= 0.0

    def _let_pass(self) -> None:
        """Let those through whose turn it is, and come back when it is the next one's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._may_pass():
            _, _, num_bytes, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else cancelled
                self.charge(num_bytes)
                turn.set_result(None)
        if self._waiting and self._bucket is not None:
            wait_s = self._bucket.wait_s(self._now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._let_pass)


class Places:
    """A number of places, which may change; who finds none free waits, in the order of coming."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def set(self, num_places: int) -> None:
        """So many from now on; who has a place keeps it."""
        self._num_places = num_places
        self._give()

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its place already
                self._free()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._free()

    def _free(self) -> None:
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and self._num_taken < self._num_places:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)
