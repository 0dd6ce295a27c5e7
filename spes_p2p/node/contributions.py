"""Who gave what to a run, counted from its certificates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.state import bytes_of
from spes_p2p.protocol.wire import ItemKind, RefusalReason


@dataclass(slots=True)
class Contribution:
    """What one peer gave."""

    rounds: int = 0
    """Rounds whose cut has an item of it."""
    updates: int = 0
    """Accepted ones, late ones included."""
    tokens: int = 0
    """Of the accepted updates."""
    shards: set[int] = field(default_factory=set)
    """Shards whose value it changed as an owner."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Updates that were refused, wholly or for their experts, by reason."""


class Contributions:
    """Counts certificate by certificate."""

    def __init__(self) -> None:
        self.by_peer: dict[PeerId, Contribution] = {}

    def add(self, before: Head, body: Body, after: Head) -> None:
        """One certificate more, which leads from `before` to `after`."""
        peers = (*before.state.members, *body.newcomers)
        reasons = {remark.entry: remark.reason for remark in body.refused}
        present = {peers[entry.who] for entry in body.entries if entry.kind is not ItemKind.EVIDENCE}
        for peer in sorted(present):
            self._of(peer).rounds += 1
        for place, entry in enumerate(body.entries):
            if entry.kind is not ItemKind.UPDATE:
                continue
            given, reason = self._of(peers[entry.who]), reasons.get(place)
            if reason is not None:
                given.refusals[reason.name.lower().replace("_", " ")] += 1
            if reason is not RefusalReason.SUPERSEDED:
                given.updates += 1
                given.tokens += entry.tokens
        for row in after.state.leases:
            for owner in row.owners:
                if owner.last == body.round:
                    self._of(PeerId(bytes_of(owner))).shards.add(row.shard)

    def _of(self, peer: PeerId) -> Contribution:
        return self.by_peer.setdefault(peer, Contribution())
