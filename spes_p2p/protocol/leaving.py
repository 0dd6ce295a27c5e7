"""A proper leave: the statement, then the wait for the successors (docs/protocol.md, section 8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import NO_DIGEST


@dataclass(slots=True)
class Leaving:
    """A proper leave that was asked for."""

    handover: Digest
    handover_bytes: int
    certified_at_ms: int | None = None
    shards: tuple[int, ...] = ()
    successors: set[PeerId] = field(default_factory=set)
    """Those who have not fetched what is handed over."""
    num_successors: int = 0
    done: bool = False
    reported: bool = False

    @property
    def pending(self) -> bool:
        """Whether no certificate has let this peer go yet."""
        return self.certified_at_ms is None

    def certified(self, before: Head, after: Head, me: PeerId, now_ms: int) -> None:
        """A certificate was adopted: it may have let this peer go."""
        if not self.pending or after.state.row(me) is not None:
            return
        self.certified_at_ms = now_ms
        if self.handover != NO_DIGEST:
            self.shards = before.state.shards_of(me)
            self.successors = {owner for shard in self.shards for owner in after.state.owners(shard)}
            self.num_successors = len(self.successors)
        self.done = not self.successors

    def taken_over(self, successor: PeerId, handover: Digest) -> None:
        """A successor has what was handed over."""
        if handover == self.handover:
            self.successors.discard(successor)
            self.done = not self.pending and not self.successors

    def ends(self, now_ms: int, round_max_ms: int) -> bool:
        """Whether the leave is complete, said once; it waits no longer than a round for the successors."""
        if self.certified_at_ms is not None and not self.done:
            self.done = now_ms - self.certified_at_ms >= round_max_ms
        if not self.done or self.reported:
            return False
        self.reported = True
        return True
