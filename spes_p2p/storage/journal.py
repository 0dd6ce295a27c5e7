"""`SqliteJournal`: what this node has promised, durable before it is sent.

A node that forgets what it signed can sign something else for the same slot, and a peer that does so is evicted. So
every `put` is one transaction with its write-ahead log synced, and a damaged journal is never replaced by an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from spes_p2p.storage.database import Database

_KIND = 0x73706A31  # "spj1"
_VERSION = 1
_SCHEMA = "CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
_REMEDY = (
    "Without it this peer could contradict its own votes. Restore it from a backup, or move the data folder away and "
    "join as a new peer."
)


class SqliteJournal:
    """Satisfies `ports.Journal`. Threads may share it.

    Raises LocalStateError if the file is damaged (all of it is read when it is opened), MachineError when the disk is
    full or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(path, kind=_KIND, version=_VERSION, schema=_SCHEMA, remedy=_REMEDY)
        try:
            self._database.check()
        except BaseException:
            self._database.close()
            raise

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Store entries under their keys, all or none, durable on return; replaces what a key held before."""
        rows = [(key.encode(), value) for key, value in entries.items()]
        with self._database.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO entry VALUES (?, ?)", rows)

    def scan(self, prefix: str = "") -> dict[str, bytes]:
        """All entries whose key starts with `prefix`, sorted by key."""
        # UTF-8 keeps the order of code points and has no byte 0xff: the range holds all keys with the prefix
        first = prefix.encode()
        rows = self._database.query(
            "SELECT key, value FROM entry WHERE key >= ? AND key < ? ORDER BY key", (first, first + b"\xff")
        )
        return {key.decode(): value for key, value in rows}

    def prune(self, keys: Iterable[str]) -> None:
        """Forget entries, all or none; a key that is not there is no error."""
        rows = [(key.encode(),) for key in keys]
        with self._database.transaction() as connection:
            connection.executemany("DELETE FROM entry WHERE key = ?", rows)

    def close(self) -> None:
        """Let the file go; harmless when repeated."""
        self._database.close()
