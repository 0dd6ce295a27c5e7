"""Hours of the day at which training may run, in local time: `22:00-07:00`, several with commas between. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import time

_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
_DAY_MIN = 24 * 60
_EXAMPLE = "give hours such as 22:00-07:00, or several: 22:00-07:00,12:00-13:30"


@dataclass(frozen=True, slots=True)
class Window:
    """From one minute of the day to another, that one excluded; over midnight where `begin` is the later one."""

    begin_min: int
    end_min: int
    """At most 24:00."""

    def has(self, minute: int) -> bool:
        """Whether a minute of the day lies in it."""
        if self.begin_min < self.end_min:
            return self.begin_min <= minute < self.end_min
        return minute >= self.begin_min or minute < self.end_min

    def __str__(self) -> str:
        return f"{_clock(self.begin_min)}-{_clock(self.end_min)}"


@dataclass(frozen=True, slots=True)
class Hours:
    """One or several windows."""

    windows: tuple[Window, ...]

    def allow(self, now: time) -> bool:
        """Whether this time of the day lies in one of them."""
        return any(window.has(_minute(now)) for window in self.windows)

    def begins_at(self, now: time) -> str:
        """The time of the day, such as `22:00`, at which the next window begins."""
        soonest = min(self.windows, key=lambda window: (window.begin_min - _minute(now)) % _DAY_MIN)
        return _clock(soonest.begin_min % _DAY_MIN)

    def ends_at(self, now: time) -> str:
        """The time of the day at which the window that is open now ends, of several the one that ends last."""
        left = [(window.end_min - _minute(now)) % _DAY_MIN for window in self.windows if window.has(_minute(now))]
        return _clock((_minute(now) + max(left, default=0)) % _DAY_MIN)

    def __str__(self) -> str:
        return ",".join(map(str, self.windows))


def parse_hours(text: str) -> Hours:
    """Inverse of `str`. Raises ValueError that says what is wrong and shows a good example."""
    return Hours(tuple(_parse_window(part.strip()) for part in text.split(",")))


def _parse_window(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no window of hours; {_EXAMPLE}")
    begin_hour, begin_minute, end_hour, end_minute = map(int, match.groups())
    begin, end = begin_hour * 60 + begin_minute, end_hour * 60 + end_minute
    if begin >= _DAY_MIN or end > _DAY_MIN or max(begin_minute, end_minute) > 59:
        raise ValueError(f"{text!r}: there is no such time of the day; {_EXAMPLE}")
    if begin == end:
        raise ValueError(f"{text!r} begins when it ends; for the whole day give no hours")
    return Window(begin, end)


def _minute(now: time) -> int:
    return now.hour * 60 + now.minute


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
