"""How fast bytes pass in both directions, from counters that only grow. Pure: the time is given."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5.0
_LEAST_S = 1e-3
"""Two looks at the same moment are no rate."""


class Rates:
    """Bytes per second over the last WINDOW_S seconds, or since the latest look before them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def measure(self, now_s: float, up_bytes: int, down_bytes: int) -> tuple[float, float]:
        """(up, down) bytes per second; the counters are since the start, `now_s` is monotonic."""
        self._samples.append((now_s, up_bytes, down_bytes))
        while len(self._samples) > 2 and self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        then_s, up_before, down_before = self._samples[0]
        elapsed_s = max(now_s - then_s, _LEAST_S)
        return (up_bytes - up_before) / elapsed_s, (down_bytes - down_before) / elapsed_s
