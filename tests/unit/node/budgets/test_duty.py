"""The trainer's share of the time, on a simulated clock."""

from __future__ import annotations

import itertools

import pytest

from spes_p2p.node.budgets.duty import LOOK_S, DutyCycle, rest_s


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s = 0.0
        self.late_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s
        self.slept_s += seconds + self.late_s


@pytest.mark.parametrize(("share", "work_s", "rest"), [(1.0, 3.0, 0.0), (0.5, 3.0, 3.0), (0.25, 1.0, 3.0)])
def test_rest_fits_the_share(share: float, work_s: float, rest: float) -> None:
    assert rest_s(work_s, share) == pytest.approx(rest)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("late_s", [0.0, 0.03])
def test_steps_take_their_share_of_the_time_though_sleeps_are_too_long(share: float, late_s: float) -> None:
    time = Time()
    time.late_s = late_s
    duty = DutyCycle(lambda: share, lambda: False, lambda: time.now_s, time.sleep)
    worked_s = 0.0
    for step_s in itertools.islice(itertools.cycle((0.2, 1.0, 0.5)), 60):
        assert not duty.before_step()
        time.now_s += step_s
        worked_s += step_s
        duty.after_step()
    last_rest_s = rest_s(step_s, share)  # of the last step: nobody rests after it
    assert worked_s / (time.now_s + last_rest_s) == pytest.approx(share, rel=0.05)


def test_a_rest_ends_when_training_is_to_stop_and_when_the_share_is_raised() -> None:
    time, share, stops = Time(), [0.05], [False]
    duty = DutyCycle(lambda: share[0], lambda: stops[0], lambda: time.now_s, time.sleep)
    assert not duty.before_step()
    time.now_s += 10.0
    duty.after_step()

    def sleep(seconds: float) -> None:
        time.now_s += seconds
        share[0] = 1.0

    duty._sleep = sleep
    before_s = time.now_s
    assert not duty.before_step()
    assert time.now_s - before_s <= LOOK_S
    stops[0] = True
    assert duty.before_step()
