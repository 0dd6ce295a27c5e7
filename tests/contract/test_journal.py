"""What every journal promises: the fake and the one in SQLite pass the same suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_p2p.ports import Journal
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.testing.journal import MemoryJournal

Reopen = Callable[[], Journal]
"""The journal as a process sees it that starts now, after the one before it has ended."""


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    if request.param == "memory":
        kept = MemoryJournal()
        yield lambda: kept
        return
    opened: list[SqliteJournal] = []

    def open_again() -> Journal:
        for journal in opened:
            journal.close()
        opened.append(SqliteJournal(tmp_path / "journal.sqlite"))
        return opened[-1]

    yield open_again
    for journal in opened:
        journal.close()


def test_a_new_journal_is_empty(reopen: Reopen) -> None:
    assert reopen().scan() == {}


def test_entries_survive_a_restart_with_their_exact_bytes(reopen: Reopen) -> None:
    entries = {"vote/1": bytes(range(256)), "vote/2": b"", "lock": b"\0"}
    reopen().put(entries)
    assert reopen().scan() == entries


def test_put_replaces_what_a_key_held(reopen: Reopen) -> None:
    journal = reopen()
    journal.put({"view": b"1", "lock": b"a"})
    journal.put({"view": b"2"})
    assert journal.scan() == {"view": b"2", "lock": b"a"}


def test_scan_gives_the_keys_with_the_prefix_in_order(reopen: Reopen) -> None:
    journal = reopen()
    keys = ["vote/10", "vote/2", "vote", "votes", "cut/1", "vote/é", "vote/\U0010ffff", "vote/\x00"]
    journal.put({key: key.encode() for key in keys})
    expected = ["vote/\x00", "vote/10", "vote/2", "vote/é", "vote/\U0010ffff"]
    assert list(journal.scan("vote/")) == expected
    assert list(journal.scan()) == sorted(keys)
    assert journal.scan("nothing") == {}


def test_a_prefix_is_plain_text_not_a_pattern(reopen: Reopen) -> None:
    journal = reopen()
    journal.put({"a%b": b"1", "axb": b"2", "a_b": b"3", "a*": b"4"})
    assert list(journal.scan("a%")) == ["a%b"]
    assert list(journal.scan("a_")) == ["a_b"]
    assert list(journal.scan("a*")) == ["a*"]


def test_prune_forgets_for_good_and_ignores_what_is_not_there(reopen: Reopen) -> None:
    journal = reopen()
    journal.put({"a": b"1", "b": b"2", "c": b"3"})
    journal.prune(["a", "missing", "c"])
    assert journal.scan() == {"b": b"2"}
    assert reopen().scan() == {"b": b"2"}


def test_empty_puts_and_prunes_change_nothing(reopen: Reopen) -> None:
    journal = reopen()
    journal.put({"a": b"1"})
    journal.put({})
    journal.prune([])
    assert journal.scan() == {"a": b"1"}


def test_what_scan_returned_is_a_copy(reopen: Reopen) -> None:
    journal = reopen()
    journal.put({"a": b"1"})
    journal.scan()["a"] = b"2"
    assert journal.scan() == {"a": b"1"}
