"""Rates of the last seconds, from counters."""

from __future__ import annotations

import pytest

from spes_p2p.node.rates import WINDOW_S, Rates


def test_first_look_and_one_at_the_same_moment_are_no_rate_worth_more_than_a_millisecond() -> None:
    rates = Rates()
    assert rates.measure(10.0, 500, 700) == (0.0, 0.0)
    assert rates.measure(10.0, 501, 702) == (1_000.0, 2_000.0)


def test_rates_are_those_of_the_window_alone() -> None:
    rates = Rates()
    for second in range(4):
        rates.measure(float(second), 1_000 * second, 0)
    assert rates.measure(4.0, 4_000, 8_000) == (1_000.0, 2_000.0)
    assert rates.measure(4.0 + WINDOW_S, 4_000, 8_000) == (0.0, 0.0)


def test_after_a_long_time_without_a_look_the_rate_is_since_the_latest_one() -> None:
    rates = Rates()
    rates.measure(0.0, 0, 0)
    rates.measure(1.0, 900_000, 0)
    up, down = rates.measure(101.0, 1_000_000, 300)
    assert (up, down) == (pytest.approx(1_000.0), pytest.approx(3.0))
