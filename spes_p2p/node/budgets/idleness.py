"""Whether other programs use this machine, from what they take of its cores. Pure: measurements are given.

Half a core over ten seconds is somebody at work; quiet begins after a minute of less than a third of one. The gap
between the two keeps a load at the border from switching training on and off.
"""

from __future__ import annotations

from collections import deque

BUSY_CORES = 0.5
BUSY_S = 10.0
QUIET_CORES = 0.3
QUIET_S = 60.0


class Idleness:
    """Decides from a measurement every second or so."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()
        self._quiet_since_s: float | None = None
        self.busy = False
        self.cores = 0.0
        """What others took over the last BUSY_S, in cores."""

    def look(self, now_s: float, cores: float) -> None:
        """Others took so many cores on average since the last look."""
        self._samples.append((now_s, cores))
        while len(self._samples) > 1 and self._samples[0][0] <= now_s - BUSY_S:
            self._samples.popleft()
        self.cores = sum(cores for _, cores in self._samples) / len(self._samples)
        if self.cores >= QUIET_CORES:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        measured_s = now_s - self._samples[0][0]
        if self.cores >= BUSY_CORES and measured_s >= BUSY_S / 2:
            self.busy = True
        elif self._quiet_since_s is not None and now_s - self._quiet_since_s >= QUIET_S:
            self.busy = False
