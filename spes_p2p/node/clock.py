"""The real clock of a node."""

from __future__ import annotations

import time


class MonotonicClock:
    """Satisfies `ports.Clock`: the machine's monotonic clock. It has no relation to the time of day."""

    def now_ms(self) -> int:
        """Milliseconds since an unspecified moment; never goes back."""
        return time.monotonic_ns() // 1_000_000
