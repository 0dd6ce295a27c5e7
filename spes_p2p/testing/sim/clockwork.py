"""Virtual time: what is due is done in order, and time jumps from one to the next."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Clockwork:
    """A queue of actions. Of two that are due at once, the one that was entered first comes first."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = 0
        self.num_actions = 0
        """Done so far."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._count, action))

    def run(self, until: Callable[[], bool], limit_ms: int) -> bool:
        """Let time pass until a condition holds; False if the limit came first."""
        end = self.now_ms + limit_ms
        while not until():
            if not self._heap or self._heap[0][0] > end:
                self.now_ms = max(self.now_ms, end)
                return False
            self.now_ms, _, action = heapq.heappop(self._heap)
            self.num_actions += 1
            action()
        return True

    def pass_time(self, duration_ms: int) -> None:
        """Let time pass."""
        self.run(lambda: False, duration_ms)
