"""`MemoryJournal`: a journal in memory that can be copied as a crash would leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class MemoryJournal:
    """Satisfies `ports.Journal`. What `put` returned from survives; a restart is played by keeping the object."""

    def __init__(self, entries: Mapping[str, bytes] | None = None) -> None:
        self._entries = dict(entries or {})

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Store entries under their keys, replacing what a key held before."""
        self._entries.update({key: bytes(value) for key, value in entries.items()})

    def scan(self, prefix: str = "") -> dict[str, bytes]:
        """All entries whose key starts with `prefix`, sorted by key."""
        return {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}

    def prune(self, keys: Iterable[str]) -> None:
        """Forget entries; a key that is not there is no error."""
        for key in keys:
            self._entries.pop(key, None)

    def copy(self) -> MemoryJournal:
        """The journal as it is now: what a crash at this moment leaves."""
        return MemoryJournal(self._entries)
