"""The trainer's share of the time: after each step it rests, for as long as the share asks.

A share s of the time for steps of w seconds means rests of w (1 - s) / s seconds. The rest comes before the next step,
never after the last one, so that a finished update is not kept waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.1
"""A rest looks this often whether it is still wanted."""
LEAST_S = 1e-4
"""A shorter rest is none: no system sleeps so exactly."""


def rest_s(work_s: float, share: float) -> float:
    """Rest that so much work asks for under a share of the time in (0, 1]."""
    return work_s * (1.0 - share) / share


def work_s(seconds: float, num_steps: int, share: float) -> float:
    """What one of so many steps (at least one) took without the rests between them: inverse of `rest_s`."""
    return seconds / (num_steps + (num_steps - 1) * rest_s(1.0, share))


class DutyCycle:
    """Goes around each step of one training: `before_step` may sleep."""

    def __init__(
        self,
        share: Callable[[], float],
        should_stop: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = share
        self._should_stop = should_stop
        self._now_s = now_s
        self._sleep = sleep
        self._worked_s = self._rested_s = 0.0
        self._began_s: float | None = None

    def before_step(self) -> bool:
        """Rest as long as it is due; returns whether the training is to stop instead."""
        while not self._should_stop():
            # asked anew each time: a share that is changed meanwhile counts from then on
            due_s = rest_s(self._worked_s, self._share()) - self._rested_s
            if due_s < LEAST_S:
                self._began_s = self._now_s()
                return False
            began_s = self._now_s()
            self._sleep(min(due_s, LOOK_S))
            self._rested_s += self._now_s() - began_s
        return True

    def after_step(self) -> None:
        """A step has been made: the rest after it is of this step, and of what the last rest was too long or short."""
        if self._began_s is None:
            return
        over_s = self._rested_s - rest_s(self._worked_s, self._share())
        self._worked_s = self._now_s() - self._began_s
        self._rested_s = min(max(0.0, over_s), LOOK_S)
