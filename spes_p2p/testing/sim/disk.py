"""A simulated disk: write-ahead, so that a crash loses what was not synced, and may tear it.

The effects of one input are a batch. Its journal entries are written and synced at once, before its first message
leaves; a certificate is adopted by one atomic write. Between these steps are the **journal points**, numbered for each
peer from 1. A crash can be asked for at any of them.

    before write    nothing of the batch happened
    unsynced        written, not synced: a prefix of the entries is on the disk, perhaps none, perhaps all but one
    synced          all entries are durable, no message has left
    sent            one more message has left, the rest is lost
    before adopt    the messages before it have left; the ledger ends with the round before
    adopted         the ledger has the new round, what follows in the batch is lost
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from enum import Enum

from spes_p2p.protocol import effects as fx


class Point(Enum):
    """Where a crash can come."""

    BEFORE_WRITE = "before write"
    UNSYNCED = "unsynced"
    SYNCED = "synced"
    SENT = "sent"
    BEFORE_ADOPT = "before adopt"
    ADOPTED = "adopted"


def entries_of(effects: Iterable[fx.Effect]) -> dict[str, bytes]:
    """All journal entries of a batch, in order."""
    found: dict[str, bytes] = {}
    for effect in effects:
        if isinstance(effect, fx.Persist):
            found.update(effect.entries)
    return found


def written_first(effects: Iterable[fx.Effect]) -> bool:
    """Whether a batch writes before it does anything else."""
    writes = [isinstance(effect, fx.Persist) for effect in effects]
    return writes == sorted(writes, reverse=True)


def torn(entries: Mapping[str, bytes], source: random.Random) -> dict[str, bytes]:
    """What an unsynced write may leave: the first entries, not all of them."""
    kept = source.randrange(len(entries))
    return dict(list(entries.items())[:kept])
