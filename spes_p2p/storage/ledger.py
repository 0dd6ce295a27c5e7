"""`Ledger`: the certificates this node has adopted, and a few facts about its own part in them.

Certificates are opaque bytes here; who may append which is the protocol's business. The ledger itself holds one line: a
final certificate is never replaced by another for the same epoch and round.

Where a node skipped rounds there is a gap, with the waypoints that vouch for its far side. The tables of the state are
kept for some certificates, so that neither a restart nor a joiner's question replays the whole chain.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.storage.database import Database

_KIND = 0x73706C31  # "spl1"
_VERSION = 2
_SCHEMA = """
CREATE TABLE certificate (
    hash BLOB PRIMARY KEY, epoch INTEGER NOT NULL, round INTEGER NOT NULL, final INTEGER NOT NULL,
    body BLOB NOT NULL, certificate BLOB NOT NULL, attachments BLOB NOT NULL
);
CREATE INDEX certificate_place ON certificate (epoch, round);
CREATE UNIQUE INDEX one_final ON certificate (epoch, round) WHERE final;
CREATE TABLE tables (hash BLOB PRIMARY KEY, epoch INTEGER NOT NULL, round INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX tables_place ON tables (epoch, round);
CREATE TABLE gap (
    epoch INTEGER NOT NULL, from_round INTEGER NOT NULL, to_round INTEGER NOT NULL, place INTEGER NOT NULL,
    waypoint BLOB NOT NULL, PRIMARY KEY (epoch, from_round, place)
);
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE own_update (round INTEGER PRIMARY KEY, verdict TEXT NOT NULL, tokens INTEGER NOT NULL)
"""
_REMEDY = "Move it away and start again: the certificates are fetched from the run's peers."
_SELECT = "SELECT epoch, round, hash, body, certificate, attachments, final FROM certificate"
_PAGE_ROWS = 64
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One certificate, as canonical bytes."""

    epoch: int
    round: RoundNumber
    hash: Digest
    """Of `body`."""
    body: bytes
    certificate: bytes
    """Body and signatures."""
    attachments: bytes
    final: bool
    """Otherwise tentative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnUpdate:
    """What became of this node's update of one round."""

    round: RoundNumber
    verdict: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Rounds that were skipped: those between `from_round` and `to_round`."""

    epoch: int
    from_round: RoundNumber
    to_round: RoundNumber
    waypoints: tuple[bytes, ...]
    """Each vouches for the next; the last one is of `to_round`."""


class Ledger:
    """Certificates in SQLite. Threads may share it, and other processes may read while a node writes.

    Every method raises LocalStateError if the file is damaged, MachineError when the disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(path, kind=_KIND, version=_VERSION, schema=_SCHEMA, remedy=_REMEDY)

    def append(self, entry: LedgerEntry, *, meta: Mapping[str, bytes] = _NOTHING, tables: bytes = b"") -> bool:
        """Add a certificate, with the tables of its state (empty: not kept), and set `meta` in the same transaction.

        False if this body was there already: the signatures that came first stay, `meta` is set all the same.

        Raises LocalProtocolError if it is final and the ledger holds another final one for that epoch and round.
        """
        with self._database.transaction() as connection:
            is_new = _insert(connection, entry, tables)
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(meta.items()))
        return is_new

    def extend(self, entries: Sequence[tuple[LedgerEntry, bytes]]) -> None:
        """Add certificates with their tables (empty: not kept), all or none of them. Raises like `append`."""
        with self._database.transaction() as connection:
            for entry, tables in entries:
                _insert(connection, entry, tables)

    def skip(self, gap: Gap, entry: LedgerEntry, tables: bytes) -> None:
        """Add the certificate on the far side of a gap, and what vouches for it. Raises like `append`."""
        with self._database.transaction() as connection:
            _insert(connection, entry, tables)
            connection.executemany(
                "INSERT OR REPLACE INTO gap VALUES (?, ?, ?, ?, ?)",
                [
                    (gap.epoch, gap.from_round, gap.to_round, place, waypoint)
                    for place, waypoint in enumerate(gap.waypoints)
                ],
            )

    def gaps(self) -> tuple[Gap, ...]:
        """All gaps, the oldest first."""
        rows = self._database.query(
            "SELECT epoch, from_round, to_round, waypoint FROM gap ORDER BY epoch, from_round, place"
        )
        found: dict[tuple[int, int, int], list[bytes]] = {}
        for epoch, from_round, to_round, waypoint in rows:
            found.setdefault((epoch, from_round, to_round), []).append(waypoint)
        return tuple(
            Gap(epoch=epoch, from_round=RoundNumber(first), to_round=RoundNumber(last), waypoints=tuple(waypoints))
            for (epoch, first, last), waypoints in found.items()
        )

    def tables_before(self, round_number: int) -> tuple[Digest, bytes] | None:
        """(certificate hash, tables) of the newest certificate up to that round whose tables were kept."""
        rows = self._database.query(
            "SELECT hash, data FROM tables WHERE round <= ? ORDER BY epoch DESC, round DESC LIMIT 1", (round_number,)
        )
        return (Digest(rows[0][0]), bytes(rows[0][1])) if rows else None

    def by_round(self, round_number: RoundNumber) -> LedgerEntry | None:
        """The final certificate of a round, of the newest epoch that has one."""
        return self._one(f"{_SELECT} WHERE final AND round = ? ORDER BY epoch DESC LIMIT 1", (round_number,))

    def by_hash(self, certificate_hash: Digest) -> LedgerEntry | None:
        """The certificate, final or tentative, whose body has this hash."""
        return self._one(f"{_SELECT} WHERE hash = ?", (certificate_hash,))

    def latest(self) -> LedgerEntry | None:
        """The final certificate of the highest epoch and round."""
        return self._one(f"{_SELECT} WHERE final ORDER BY epoch DESC, round DESC LIMIT 1", ())

    def range(self, first: RoundNumber, last: RoundNumber) -> Iterator[LedgerEntry]:
        """Final certificates of the rounds first to last, both included, by epoch and round. Read in small pages."""
        after = (-1, -1)
        while True:
            rows = self._database.query(
                f"{_SELECT} WHERE final AND round BETWEEN ? AND ? AND (epoch, round) > (?, ?)"
                f" ORDER BY epoch, round LIMIT {_PAGE_ROWS}",
                (first, last, *after),
            )
            for row in rows:
                entry = _entry(row)
                after = (entry.epoch, entry.round)
                yield entry
            if len(rows) < _PAGE_ROWS:
                return

    def count(self) -> int:
        """How many final certificates are here."""
        ((num_final,),) = self._database.query("SELECT count(*) FROM certificate WHERE final")
        return int(num_final)

    def get_meta(self, key: str) -> bytes | None:
        """What was last set under `key`."""
        rows = self._database.query("SELECT value FROM meta WHERE key = ?", (key,))
        return bytes(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: bytes) -> None:
        """Set one value, durable on return."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def record_update(self, update: OwnUpdate) -> None:
        """Set what became of this node's update of a round; replaces an earlier verdict."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO own_update VALUES (?, ?, ?)", (update.round, update.verdict, update.tokens)
            )

    def updates(self, limit: int) -> tuple[OwnUpdate, ...]:
        """This node's `limit` latest updates, oldest first."""
        rows = self._database.query(
            "SELECT round, verdict, tokens FROM own_update ORDER BY round DESC LIMIT ?", (limit,)
        )
        return tuple(
            OwnUpdate(round=RoundNumber(number), verdict=verdict, tokens=tokens)
            for number, verdict, tokens in reversed(rows)
        )

    def check(self) -> None:
        """Read the whole file. Raises LocalStateError if any of it is damaged."""
        self._database.check()

    def close(self) -> None:
        """Let the file go; harmless when repeated."""
        self._database.close()

    def _one(self, statement: str, parameters: tuple[object, ...]) -> LedgerEntry | None:
        rows = self._database.query(statement, parameters)
        return _entry(rows[0]) if rows else None


def _insert(connection: sqlite3.Connection, entry: LedgerEntry, tables: bytes) -> bool:
    """Whether the certificate is new here. Raises LocalProtocolError if another final one is in its place."""
    place = (entry.epoch, entry.round)
    if connection.execute("SELECT 1 FROM certificate WHERE hash = ?", (entry.hash,)).fetchone() is not None:
        return False
    other = connection.execute("SELECT hash FROM certificate WHERE epoch = ? AND round = ? AND final", place).fetchone()
    if entry.final and other is not None:
        raise LocalProtocolError(
            f"round {entry.round} (epoch {entry.epoch}) is already final as {other[0].hex()}, "
            f"it cannot become {entry.hash.hex()}"
        )
    connection.execute(
        "INSERT INTO certificate (epoch, round, hash, body, certificate, attachments, final)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*place, entry.hash, entry.body, entry.certificate, entry.attachments, entry.final),
    )
    if tables:
        connection.execute("INSERT OR REPLACE INTO tables VALUES (?, ?, ?, ?)", (entry.hash, *place, tables))
    return True


def _entry(row: tuple[Any, ...]) -> LedgerEntry:
    epoch, number, certificate_hash, body, certificate, attachments, final = row
    return LedgerEntry(
        epoch=epoch,
        round=RoundNumber(number),
        hash=Digest(certificate_hash),
        body=body,
        certificate=certificate,
        attachments=attachments,
        final=bool(final),
    )
