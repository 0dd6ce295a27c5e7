"""When nobody of the run is within reach."""

from __future__ import annotations

import pytest

from spes_p2p.errors import UnreachableError
from spes_p2p.node.contact import GIVE_UP_MS, WARN_MS, ContactWatch


def watch() -> tuple[list[str], ContactWatch]:
    notes: list[str] = []
    return notes, ContactWatch(lambda level, text: notes.append(f"{level}: {text}"))


def test_silence_is_told_once_and_its_end_too() -> None:
    notes, contact = watch()
    for silent_ms in (0, WARN_MS, WARN_MS + 5_000, 2 * WARN_MS, 100):
        contact.judge(silent_ms, is_member=True, num_others=3)
    assert notes == [
        "warning: none of the run's 3 other members was reached for 60 s: waiting",
        "info: members of the run are within reach again",
    ]


def test_member_waits_as_long_as_it_takes() -> None:
    _, contact = watch()
    contact.judge(100 * GIVE_UP_MS, is_member=True, num_others=3)


def test_newcomer_gives_up_with_the_code_for_unreachable() -> None:
    notes, contact = watch()
    contact.judge(WARN_MS, is_member=False, num_others=2)
    assert "giving up after 5 minutes" in notes[0]
    with pytest.raises(UnreachableError, match="none of the run's 2 members was reached for 300 s") as raised:
        contact.judge(GIVE_UP_MS, is_member=False, num_others=2)
    assert raised.value.exit_code == 3


def test_only_member_of_a_run_misses_nobody() -> None:
    notes, contact = watch()
    contact.judge(100 * GIVE_UP_MS, is_member=True, num_others=0)
    assert notes == []
