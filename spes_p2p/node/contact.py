"""Whether any member of the run is within reach, and what is done when none is."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.errors import UnreachableError

WARN_MS = 60_000
GIVE_UP_MS = 300_000
"""A node that is no member has nothing to keep up for; a member waits for the others as long as it takes."""


class ContactWatch:
    """Judges, now and then, how long no member was heard of."""

    def __init__(self, notify: Callable[[str, str], None]) -> None:
        self._notify = notify
        self._has_warned = False

    def judge(self, silent_ms: int, *, is_member: bool, num_others: int) -> None:
        """`silent_ms`: since any other member was heard of or reached. Raises UnreachableError."""
        if silent_ms < WARN_MS or num_others == 0:
            if self._has_warned:
                self._notify("info", "members of the run are within reach again")
            self._has_warned = False
            return
        if not is_member and silent_ms >= GIVE_UP_MS:
            raise UnreachableError(
                f"none of the run's {num_others} members was reached for {silent_ms // 1000} s\n"
                "Check this machine's connection, and that the run is still going on; then join again."
            )
        if not self._has_warned:
            self._has_warned = True
            until = "" if is_member else f"; giving up after {GIVE_UP_MS // 60_000} minutes"
            self._notify(
                "warning",
                f"none of the run's {num_others} other members was reached for {silent_ms // 1000} s: waiting{until}",
            )
