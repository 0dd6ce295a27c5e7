"""Windows of the day, over midnight too."""

from __future__ import annotations

from datetime import time

import pytest

from spes_p2p.node.budgets.hours import parse_hours


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("9:30-17:00", ["09:30", "16:59"], ["09:29", "17:00", "00:00"]),
        ("22:00-24:00", ["22:00", "23:59"], ["00:00", "21:59"]),
        ("00:00-24:00", ["00:00", "12:00", "23:59"], []),
        ("22:00-07:00, 12:00-13:30", ["12:00", "13:29", "23:00"], ["13:30", "11:59"]),
    ],
)
def test_windows_begin_with_their_first_minute_and_end_before_their_last(
    text: str, inside: list[str], outside: list[str]
) -> None:
    hours = parse_hours(text)
    assert [hours.allow(time.fromisoformat(at)) for at in inside] == [True] * len(inside)
    assert [hours.allow(time.fromisoformat(at)) for at in outside] == [False] * len(outside)
    assert parse_hours(str(hours)) == hours


def test_says_when_it_ends_and_when_it_begins_again() -> None:
    hours = parse_hours("22:00-07:00,12:00-13:30,12:30-14:00")
    assert hours.ends_at(time(23, 30)) == "07:00"
    assert hours.ends_at(time(12, 45)) == "14:00"
    assert hours.begins_at(time(8, 0)) == "12:00"
    assert hours.begins_at(time(15, 0)) == "22:00"
    assert parse_hours("20:00-24:00").ends_at(time(21, 0)) == "00:00"


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "24:00-01:00", "22:00-07:00,"]
)
def test_nonsense_is_refused_with_the_token(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours|time of the day"):
        parse_hours(text)
