"""What SQLite adds to the journal's contract: durability, damage, full disks."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.errors import LocalStateError, MachineError
from spes_p2p.storage.atomic import TEMP_PREFIX
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.storage.ledger import Ledger

KILLED = """
import os, signal, sys
from pathlib import Path
from spes_p2p.storage.journal import SqliteJournal
journal = SqliteJournal(Path(sys.argv[1]))
journal.put({"vote/1": b"yes", "lock": b"1"})
with journal._database.transaction() as connection:
    connection.execute("DELETE FROM entry")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "journal.sqlite"


def fill(path: Path, num_entries: int = 200) -> None:
    journal = SqliteJournal(path)
    journal.put({f"vote/{number:04}": os.urandom(500) for number in range(num_entries)})
    journal.close()


def tear_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def tear_in_a_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite_the_middle(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


def text(path: Path) -> None:
    path.write_text("not a database\n" * 100)


def test_commits_wait_for_the_medium_and_use_the_write_ahead_log(path: Path) -> None:
    journal = SqliteJournal(path)
    assert journal._database.query("PRAGMA synchronous") == [(2,)]
    assert journal._database.query("PRAGMA journal_mode") == [("wal",)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    journal.close()


def test_a_kill_leaves_what_put_returned_from_and_nothing_of_what_was_under_way(path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    journal = SqliteJournal(path)
    assert journal.scan() == {"lock": b"1", "vote/1": b"yes"}
    journal.close()


def test_a_put_that_fails_in_the_middle_stores_nothing(path: Path) -> None:
    journal = SqliteJournal(path)
    journal.put({"a": b"1"})
    with pytest.raises(sqlite3.Error):
        journal.put({"a": b"2", "b": object()})
    assert journal.scan() == {"a": b"1"}
    journal.put({"a": b"3"})
    assert journal.scan() == {"a": b"3"}
    journal.close()


@pytest.mark.parametrize("damage", [tear_half, tear_in_a_page, empty, overwrite_the_middle, text])
def test_a_torn_journal_is_refused_with_path_and_remedy_and_never_replaced(
    path: Path, damage: Callable[[Path], None]
) -> None:
    fill(path)
    damage(path)
    content = path.read_bytes()
    with pytest.raises(LocalStateError) as caught:
        SqliteJournal(path)
    assert str(path) in str(caught.value)
    assert "backup" in str(caught.value)
    assert str(caught.value).count("\n") == 1
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(LocalStateError, match="is not a file"):
        SqliteJournal(path)


def test_the_database_of_another_purpose_is_refused(path: Path) -> None:
    Ledger(path).close()
    with pytest.raises(LocalStateError, match="another program or version"):
        SqliteJournal(path)


def test_a_start_killed_while_it_made_the_file_does_no_harm(path: Path) -> None:
    path.parent.mkdir()
    left = path.parent / f"{TEMP_PREFIX}0011"
    left.write_bytes(b"SQLite format 3\0")
    journal = SqliteJournal(path)
    assert journal.scan() == {}
    assert not left.exists()
    journal.close()


def test_a_full_disk_refuses_the_put_keeps_what_was_there_and_goes_on_when_there_is_room(path: Path) -> None:
    journal = SqliteJournal(path)
    journal.put({"vote/1": b"yes"})
    journal._database.query("PRAGMA max_page_count=4")  # SQLite then says what it says on ENOSPC: SQLITE_FULL
    with pytest.raises(MachineError, match=f"disk full: cannot write in {path.parent}"):
        journal.put({"vote/2": bytes(100_000), "vote/3": b"yes"})
    assert journal.scan() == {"vote/1": b"yes"}
    journal._database.query("PRAGMA max_page_count=1000000")
    journal.put({"vote/2": bytes(100_000)})
    assert list(journal.scan()) == ["vote/1", "vote/2"]
    journal.close()


def test_threads_may_put_at_once(path: Path) -> None:
    journal = SqliteJournal(path)
    threads = [
        threading.Thread(target=lambda own=own: [journal.put({f"{own}/{n}": b"x"}) for n in range(10)])
        for own in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.scan()) == 40
    journal.close()
