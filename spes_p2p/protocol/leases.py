"""Who owns which shard next: docs/protocol.md, section 8, rules 1 to 5.

A pure function of (terms, roster after the cut, owners that delivered, claimers); arrival order never matters.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping

from spes_p2p.ids import PeerId
from spes_p2p.protocol import election
from spes_p2p.protocol.body import Tenure
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.roster import qualified
from spes_p2p.protocol.state import LeaseRow, RosterRow, bytes_of


class _Table:
    """Leases while they are being decided."""

    def __init__(self, terms: Terms, roster: tuple[RosterRow, ...], leases: Mapping[int, list[Tenure]]) -> None:
        self.terms = terms
        self._limits = {row.peer: row.capacity if qualified(terms, row) else min(row.capacity, 1) for row in roster}
        """Per member, the most shards: before it qualifies it holds at most one."""
        self.leases = dict(leases)
        self._owned: dict[PeerId, list[int]] = {}
        for shard, owners in sorted(leases.items()):
            for owner in owners:
                self._owned.setdefault(PeerId(bytes_of(owner)), []).append(shard)

    @property
    def num_members(self) -> int:
        """After the cut."""
        return len(self._limits)

    def owned(self, peer: PeerId) -> list[int]:
        """Ascending."""
        return self._owned.get(peer, [])

    def counts(self) -> dict[PeerId, int]:
        """How many shards each owner has."""
        return {peer: len(shards) for peer, shards in self._owned.items()}

    def room(self, peer: PeerId) -> int:
        """How many more shards a member may own."""
        return self._limits[peer] - len(self.owned(peer))

    def grant(self, shard: int, peer: PeerId) -> None:
        owners = [*self.leases[shard], Tenure(peer, self.terms.round, 0)]
        self.leases[shard] = sorted(owners, key=bytes_of)
        insort(self._owned.setdefault(peer, []), shard)

    def revoke(self, shard: int, peer: PeerId) -> None:
        self.leases[shard] = [owner for owner in self.leases[shard] if owner.who != peer]
        self._owned[peer].remove(shard)

    def first_with_room(self, shard: int, peers: Collection[PeerId]) -> PeerId | None:
        order = election.claim_order(self.terms.seed, shard, [peer for peer in peers if self.room(peer) > 0])
        return order[0] if order else None


def next_leases(
    terms: Terms,
    roster: tuple[RosterRow, ...],
    delivered: Mapping[int, frozenset[PeerId]],
    claimers: frozenset[PeerId],
    present: frozenset[PeerId] = frozenset(),
) -> tuple[tuple[LeaseRow, ...], frozenset[PeerId]]:
    """Leases after the cut, and the claimers that got a shard.

    `delivered`: per shard, the owners whose update for it was accepted in this cut. `claimers`: members after the cut
    that claim or join in it. `present`: members with an item in the cut; in a tentative one, nobody else gets a shard
    without asking.
    """
    members = {row.peer for row in roster}
    kept: dict[int, list[Tenure]] = {}
    now = terms.round if terms.tentative else terms.height  # tentative rounds age no lease of the final chain
    for row in _leases_before(terms):
        kept[row.shard] = []
        for owner in row.owners:
            peer = PeerId(bytes_of(owner))
            last = terms.round if peer in delivered.get(row.shard, frozenset()) else owner.last
            if peer in members and now - max(owner.begun, last) < terms.config.protocol.lease_rounds:
                kept[row.shard].append(Tenure(peer, owner.begun, last))
    table = _Table(terms, roster, kept)
    served = set()
    for shard in sorted(table.leases):
        if table.leases[shard]:
            continue
        winner = table.first_with_room(shard, claimers)
        if winner is not None:
            served.add(winner)
        else:
            winner = table.first_with_room(shard, members & present if terms.tentative else members)
        if winner is not None:
            table.grant(shard, winner)
    for peer in election.rank(terms.seed, "move", claimers - served):
        if not table.owned(peer) and table.room(peer) > 0:
            _make_room(table, peer)
            served.add(peer)
    leases = tuple(LeaseRow(shard, tuple(owners)) for shard, owners in sorted(table.leases.items()))
    return leases, frozenset(served)


def _leases_before(terms: Terms) -> tuple[LeaseRow, ...]:
    """The leases that a cut changes: a final one those of the last final certificate. What tentative ones granted or
    took is void, but that an owner delivered meanwhile counts."""
    tip = terms.head
    if terms.tentative or tip.is_final:
        return tip.state.leases
    rows = []
    for before, row in zip(tip.last_final.state.leases, tip.state.leases, strict=True):
        last = {bytes_of(owner): owner.last for owner in row.owners}
        owners = (
            Tenure(owner.who, owner.begun, max(owner.last, last.get(bytes_of(owner), 0))) for owner in before.owners
        )
        rows.append(LeaseRow(row.shard, tuple(owners)))
    return tuple(rows)


def _make_room(table: _Table, peer: PeerId) -> None:
    """Rule 5: a shard of the owner with too many, else a place beside the fewest owners."""
    counts = table.counts()
    fair = -(-len(table.leases) // table.num_members)
    most = max(counts.values(), default=0)
    seed = table.terms.seed
    if most > fair:
        richest = election.rank(seed, "rich", [owner for owner, count in counts.items() if count == most])[0]
        shard = table.owned(richest)[-1]
        table.revoke(shard, richest)
        table.grant(shard, peer)
        return
    fewest = min(len(owners) for owners in table.leases.values())
    shards = [shard for shard, owners in sorted(table.leases.items()) if len(owners) == fewest]
    chosen = min(shards, key=lambda shard: (election.claim_weight(seed, shard, peer), shard))
    table.grant(chosen, peer)
