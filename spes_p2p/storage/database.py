"""SQLite files that are complete from their first moment, durable at every commit, and plain in their complaints.

A database is built under a temporary name and renamed when it is whole. So an empty or half-made file is never a young
database but always damage, and is reported instead of being taken for a fresh start.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_p2p.errors import LocalStateError, MachineError, SpesError
from spes_p2p.storage.atomic import disk_errors, fsync_folder, make_folder, remove_leftovers, temp_file
from spes_p2p.storage.lock import exclusive

_BUSY_TIMEOUT_S = 30.0


class Database:
    """One connection that threads share, one at a time; each `transaction` is atomic, and durable when it ends.

    `schema` is run once, when the file is made; `kind` and `version` are stored in it and checked at every opening.
    Every method raises LocalStateError if the file is damaged or of another kind, MachineError if the disk is full or
    refuses; both name the path and what to do (`remedy` for damage).
    """

    def __init__(self, path: Path, *, kind: int, version: int, schema: str, remedy: str) -> None:
        self._path = path
        self._remedy = remedy
        self._lock = threading.RLock()
        make_folder(path.parent)
        with exclusive(path.with_name(path.name + ".lock")):
            remove_leftovers(path.parent)
            if not path.exists():
                self._create(kind, version, schema)
        if not path.is_file():
            raise LocalStateError(f"{path} is not a file\n{remedy}")
        if path.stat().st_size == 0:
            raise LocalStateError(f"{path} is empty: it was damaged\n{remedy}")
        with self._errors():
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S
            )
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                found = self._pragma("application_id"), self._pragma("user_version")
            except sqlite3.Error:
                self._connection.close()
                raise
        if found != (kind, version):
            self._connection.close()
            raise LocalStateError(
                f"{path} was made by another program or version ({found[0]}.{found[1]}, expected {kind}.{version})\n"
                f"{remedy}"
            )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All statements of the block, or none if it raises."""
        with self._lock, self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                # SQLite has already rolled back by itself after some failures, a full disk among them
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def query(self, statement: str, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""
        with self._lock, self._errors():
            return self._connection.execute(statement, parameters).fetchall()

    def check(self) -> None:
        """Read the whole file. Raises LocalStateError if any of it is damaged."""
        with self._lock, self._errors():
            rows = self._connection.execute("PRAGMA quick_check(1)").fetchall()
        if rows != [("ok",)]:
            first_problem = str(rows[0][0]).splitlines()[-1]
            raise LocalStateError(f"{self._path} is damaged: {first_problem}\n{self._remedy}")

    def close(self) -> None:
        """Write everything into the main file and let it go; harmless when repeated."""
        with self._lock:
            self._connection.close()

    def _pragma(self, name: str) -> int:
        (value,) = self._connection.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    def _create(self, kind: int, version: int, schema: str) -> None:
        with temp_file(self._path.parent) as temp, self._errors():
            connection = sqlite3.connect(temp.path, isolation_level=None)
            try:
                connection.executescript(
                    # no side files: a clean-up in another process could take them for leftovers
                    "PRAGMA journal_mode=MEMORY;"
                    f"PRAGMA application_id={kind}; PRAGMA user_version={version}; BEGIN; {schema}; COMMIT;"
                )
            finally:
                connection.close()
            temp.sync()
            temp.rename(self._path)
            fsync_folder(self._path.parent)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with disk_errors(self._path.parent):
                yield
        except sqlite3.DatabaseError as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: sqlite3.DatabaseError) -> SpesError | None:
        """What a person can do about it; None for a mistake in the program."""
        # extended codes carry the primary one in the lowest byte; misuse of the module has none
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF
        folder = self._path.parent
        if code == sqlite3.SQLITE_FULL:
            return MachineError(
                f"disk full: cannot write in {folder}\nFree some space there; it goes on from the last good state."
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return LocalStateError(f"{self._path} is damaged: {error}\n{self._remedy}")
        if code == sqlite3.SQLITE_BUSY:
            return LocalStateError(f"{self._path} is in use by another process\nEnd that one, then try again.")
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            return MachineError(f"no access to {self._path}: {error}\nMake it writable for this user.")
        if code == sqlite3.SQLITE_IOERR:
            return MachineError(f"the disk failed at {self._path}: {error}\nCheck the disk (dmesg) and its free space.")
        return None
