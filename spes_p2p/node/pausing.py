"""A pause: the user's wish, which outlives a restart, and how long the node keeps its leases without training.

lease      lapses with the certificate of round max(begun, last accepted) + lease_rounds (docs/protocol.md, section 8)
member     for as long as the node runs: a paused one still says each round that it is alive, votes and serves
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from spes_p2p.errors import MachineError
from spes_p2p.ids import PeerId
from spes_p2p.node.files import PAUSE_FILE
from spes_p2p.node.holds import PAUSE, Holds
from spes_p2p.node.snapshot import PauseView
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.state import bytes_of
from spes_p2p.storage.atomic import write_file

_ROUNDS_REMEMBERED = 8


class PauseWish:
    """The user's pause on disk: an empty file while it lasts."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / PAUSE_FILE

    @property
    def is_stored(self) -> bool:
        """Whether a pause was asked for that has not ended, perhaps before a restart."""
        return self._path.exists()

    def store(self, paused: bool) -> None:
        """Remember it, or that it is over. Raises MachineError if the disk refuses."""
        if paused:
            write_file(self._path, b"")
        else:
            self._path.unlink(missing_ok=True)


class Pace:
    """How long rounds take: the median of the last few, so that one long round or a burst of caught-up ones does not
    decide."""

    def __init__(self) -> None:
        self._adopted_at_ms: deque[int] = deque(maxlen=_ROUNDS_REMEMBERED + 1)

    def adopted(self, now_ms: int) -> None:
        """A certificate was adopted."""
        self._adopted_at_ms.append(now_ms)

    @property
    def round_ms(self) -> int | None:
        """None: no whole round was seen yet."""
        at = list(self._adopted_at_ms)
        gaps = [after - before for before, after in pairwise(at)]
        return round(median(gaps)) if gaps else None

    def until_ms(self, num_rounds: int, elapsed_ms: int) -> int | None:
        """About how long until the open round and those after it, `num_rounds` in all, have ended."""
        length = self.round_ms
        return None if length is None else max(length - elapsed_ms, 0) + max(num_rounds - 1, 0) * length


def lease_end(head: Head, me: PeerId) -> tuple[int, tuple[int, ...]] | None:
    """The first round whose final certificate takes a shard from `me` unless an update of `me` for it is accepted
    before, and the shards that it takes; None: `me` owns none."""
    lease_rounds = head.run.config.protocol.lease_rounds
    ends: dict[int, list[int]] = {}
    for row in head.state.leases:
        for owner in row.owners:
            if bytes_of(owner) == me:
                ends.setdefault(max(owner.begun, owner.last) + lease_rounds, []).append(row.shard)
    if not ends:
        return None
    first = min(ends)
    # a certificate that should have taken it was tentative: the next final one does
    return max(first, head.height), tuple(ends[first])


def pause_view(
    holds: Holds,
    head: Head | None,
    me: PeerId,
    pace: Pace,
    *,
    now_ms: int,
    elapsed_ms: int,
    leaving: bool = False,
) -> PauseView:
    """What the pause costs and when. `elapsed_ms`: how long the open round has lasted. `leaving`: the shards pass to
    others anyway, and nobody who leaves trains again to keep them."""
    since_ms = holds.since_ms
    lasted_ms = 0 if since_ms is None else now_ms - since_ms
    if leaving:
        return PauseView(reasons=holds.reasons, since_ms=lasted_ms)
    end = lease_end(head, me) if head is not None else None
    if head is None or end is None:
        text = "no shard to lose: the node goes on voting and serving" if head is not None else ""
        return PauseView(reasons=holds.reasons, since_ms=lasted_ms, reason=text)
    first, shards = end
    num_rounds = first - head.round
    left_ms = pace.until_ms(num_rounds, elapsed_ms)
    if len(head.state.roster) == 1:
        # alone and paused, nobody ends a round before its time
        left_ms = num_rounds * head.run.config.protocol.round_max_ms - elapsed_ms
    return PauseView(
        reasons=holds.reasons,
        since_ms=lasted_ms,
        lease_ends_round=first,
        rounds_left=num_rounds,
        lease_ends_in_ms=left_ms,
        shards=shards,
        reason=_lease_text(shards, num_rounds, first, left_ms),
    )


def _lease_text(shards: tuple[int, ...], num_rounds: int, first: int, left_ms: int | None) -> str:
    about = "" if left_ms is None else f", {_in_minutes(left_ms)}"
    if num_rounds <= 1:
        return (
            f"{shards_text(shards)} kept until this round ends{about}: train again before, or others get what was yours"
        )
    return (
        f"{shards_text(shards)} kept for {num_rounds} rounds, until round {first} ends{about}; then others may get them"
    )


def shards_text(shards: Sequence[int]) -> str:
    """Such as `shard 3`, `shards 1, 2`."""
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


def _in_minutes(left_ms: int) -> str:
    minutes = round(left_ms / 60_000)
    return "in less than a minute" if minutes < 1 else f"in about {minutes} minute{'' if minutes == 1 else 's'}"


def _lost_text(head: Head, lost: list[int], *, leaving: bool) -> str:
    """Whose the shards are that lapsed: somebody's, or nobody's."""
    taken = tuple(shard for shard in lost if head.state.owners(shard))
    vacant = tuple(shard for shard in lost if not head.state.owners(shard))
    texts = []
    if taken:
        texts.append(f"{shards_text(taken)} {'belong' if len(taken) > 1 else 'belongs'} to others now")
    if vacant:
        claimed = "" if leaving else ", and claimed when training goes on"
        texts.append(f"{shards_text(vacant)} {'are' if len(vacant) > 1 else 'is'} vacant{claimed}")
    return "; ".join(texts)


class LeaseWatch:
    """Tells a paused volunteer, in time, that shards are about to pass on, and when they have."""

    def __init__(self, me: PeerId, notify: Callable[[str, str], None]) -> None:
        self._me = me
        self._notify = notify
        self._warned_of: int | None = None
        self._owned: frozenset[int] = frozenset()

    def look(self, holds: Holds, head: Head, view: PauseView | None, *, leaving: bool) -> None:
        """After each certificate, and when the hold changes. `view`: None while nothing is held. `leaving`: a leave was
        asked for, so that nothing is advised, and what the leave itself hands over is no loss."""
        owned = frozenset(head.state.shards_of(self._me))
        lost, self._owned = self._owned - owned, owned
        if view is None:
            self._warned_of = None
            return
        has_left = leaving and head.state.row(self._me) is None
        if lost and not has_left:
            text = _lost_text(head, sorted(lost), leaving=leaving)
            self._notify("warning", f"training was held for longer than the lease lasts: {text}")
        if not leaving and view.rounds_left == 1 and view.lease_ends_round != self._warned_of:
            self._warned_of = view.lease_ends_round
            how = " (`spes-p2p resume`)" if PAUSE in holds.reasons else ""
            self._notify("warning", f"{view.reason}{how}")


def paused_before_text(*, leaving: bool) -> str:
    """Of a pause that outlived a restart; whoever is leaving is not told to train again."""
    return "paused before this start, and still" + ("" if leaving else ": `spes-p2p resume` trains again")


def remember(wish: PauseWish, paused: bool, notify: Callable[[str, str], None]) -> None:
    """Store a pause or its end; a disk that refuses is told, and the pause holds until the node ends."""
    try:
        wish.store(paused)
    except MachineError as error:
        notify("warning", f"a restart would forget the pause: {error}")
