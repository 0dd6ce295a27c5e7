"""Bytes of the calendar month, both directions. Pure: counters and the date are given.

What is stored runs ahead of what was counted by an allowance, and is stored again before that is used up. So a kill at
any moment counts at most the allowance too much, and nothing too little, unless traffic grows tenfold within a look.
"""

from __future__ import annotations

from datetime import date

import msgspec

ALLOWANCE_BYTES = 4_000_000
LOOKS_AHEAD = 10
"""The allowance is at least what so many looks would count at the present rate."""


class MonthCount(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `month.json`."""

    month: str
    """Such as `2026-11`."""
    up_bytes: int
    down_bytes: int


class MonthBook:
    """Adds up what a node's counters say, which begin at zero with it."""

    def __init__(self, stored: MonthCount | None, today: date) -> None:
        self._month = month_of(today)
        self.up_bytes = self.down_bytes = 0
        self._seen = (0, 0)
        self._stored_total = -1
        if stored is not None and stored.month >= self._month:
            # a later one: the clock was set back; what was counted stays counted
            self._month, self.up_bytes, self.down_bytes = stored.month, stored.up_bytes, stored.down_bytes
            self._stored_total = self.total_bytes

    @property
    def total_bytes(self) -> int:
        """Of this month so far."""
        return self.up_bytes + self.down_bytes

    def look(self, up_bytes: int, down_bytes: int, today: date) -> MonthCount | None:
        """Take in the node's counters since its start. Returns what is to be stored now, if anything."""
        if month_of(today) > self._month:
            self._month, self.up_bytes, self.down_bytes, self._stored_total = month_of(today), 0, 0, -1
        up, down = up_bytes - self._seen[0], down_bytes - self._seen[1]
        self._seen = (up_bytes, down_bytes)
        self.up_bytes += up
        self.down_bytes += down
        allowance = max(ALLOWANCE_BYTES, LOOKS_AHEAD * (up + down))
        if self.total_bytes + allowance // 4 <= self._stored_total:
            return None
        self._stored_total = self.total_bytes + allowance
        return MonthCount(month=self._month, up_bytes=self.up_bytes + allowance, down_bytes=self.down_bytes)

    def exact(self) -> MonthCount:
        """To be stored at a proper end."""
        return MonthCount(month=self._month, up_bytes=self.up_bytes, down_bytes=self.down_bytes)


def month_of(today: date) -> str:
    """Such as `2026-11`."""
    return f"{today.year:04}-{today.month:02}"


def first_of_next(today: date) -> date:
    """When counting begins anew."""
    return date(today.year + today.month // 12, today.month % 12 + 1, 1)
