"""The three tables of the state: roster, leases, shards; their roots, and the deltas between two states.

Each table is a sorted tuple of frozen rows; its root is the hash of its canonical encoding. A delta names peers by
their place in the previous roster, then in the list of newcomers, so that a body stays small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import BlobShare, Body, LeaseDelta, RosterDelta, ShardDelta, Tenure
from spes_p2p.protocol.codec import ENCODER
from spes_p2p.protocol.wire import Count, Peer, Small, Wire


class RosterRow(Wire, frozen=True):
    """One member."""

    peer: Peer
    capacity: Small
    """Most shards it wants to own; 0 until it has said."""
    accepted: Count
    """Accepted updates."""
    base_round: Count
    """Round of the newest accepted update; 0: none."""
    last_item_round: Count
    """Last round whose cut had an item of it."""
    voter_since: Count | None
    """Round whose certificate made it a voter."""


class LeaseRow(Wire, frozen=True):
    """Owners of one shard, sorted by peer; none: an orphan."""

    shard: Small
    owners: tuple[Tenure, ...]


class ShardRow(Wire, frozen=True):
    """Blobs of one shard, sorted by (blob, tokens): one, or one per co-owner."""

    shard: Small
    blobs: tuple[BlobShare, ...]


class State(Wire, frozen=True):
    """The tables after a certificate."""

    roster: tuple[RosterRow, ...]
    leases: tuple[LeaseRow, ...]
    shards: tuple[ShardRow, ...]

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Everyone in the roster, by peer id."""
        return tuple(row.peer for row in self.roster)

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """The voters of the next round, by peer id."""
        return voters_of(self.roster)

    def row(self, peer: PeerId) -> RosterRow | None:
        """The member's row."""
        place = bisect_left(self.roster, peer, key=_peer_of)
        return self.roster[place] if place < len(self.roster) and self.roster[place].peer == peer else None

    def owners(self, shard: int) -> tuple[PeerId, ...]:
        """Owners of a shard, by peer id."""
        return tuple(PeerId(bytes_of(tenure)) for tenure in self.leases[shard].owners)

    def shards_of(self, peer: PeerId) -> tuple[int, ...]:
        """Shards a peer owns or co-owns, ascending."""
        return tuple(row.shard for row in self.leases if any(tenure.who == peer for tenure in row.owners))


def _peer_of(row: RosterRow) -> PeerId:
    return row.peer


def bytes_of(tenure: Tenure) -> bytes:
    """The peer of a tenure in a state (in a delta it is a place)."""
    if isinstance(tenure.who, int):
        raise RemoteProtocolError(None, "a lease row names an owner by place")
    return tenure.who


def _root(name: str, rows: Sequence[Wire]) -> Digest:
    return digest(f"spes {name}", ENCODER.encode(tuple(rows)))


def roster_root(rows: tuple[RosterRow, ...]) -> Digest:
    """Root of a roster."""
    return _root("roster", rows)


def voters_of(rows: tuple[RosterRow, ...]) -> tuple[PeerId, ...]:
    """The voters of the round after a roster, by peer id."""
    return tuple(row.peer for row in rows if row.voter_since is not None)


def roots(state: State) -> tuple[Digest, Digest, Digest]:
    """Roots of roster, leases and shards."""
    return roster_root(state.roster), _root("leases", state.leases), _root("shards", state.shards)


def shard_row_hash(row: ShardRow) -> Digest:
    """What an expert blob names as its base row."""
    return digest("spes shard row", ENCODER.encode(row))


def numbering(old: State, newcomers: Sequence[PeerId]) -> dict[PeerId, int]:
    """Places of peers in a body: the previous roster, then the newcomers."""
    return {peer: place for place, peer in enumerate((*old.members, *newcomers))}


def roster_delta(old: State, new: State, places: Mapping[PeerId, int]) -> tuple[RosterDelta, ...]:
    """Changed rows, ascending by place."""
    before = {row.peer: row for row in old.roster}
    after = {row.peer: row for row in new.roster}
    found = []
    for peer, place in sorted(places.items(), key=lambda item: item[1]):
        row = after.get(peer)
        if row is None and peer in before:
            found.append(RosterDelta(place, True, 0, 0, 0, 0, None))
        elif row is not None and row != before.get(peer):
            found.append(
                RosterDelta(
                    place, False, row.capacity, row.accepted, row.base_round, row.last_item_round, row.voter_since
                )
            )
    return tuple(found)


def lease_delta(old: State, new: State, places: Mapping[PeerId, int]) -> tuple[LeaseDelta, ...]:
    """Changed leases, ascending by shard, owners by place."""
    return tuple(
        LeaseDelta(
            row.shard,
            tuple(Tenure(places[PeerId(bytes_of(owner))], owner.begun, owner.last) for owner in row.owners),
        )
        for before, row in zip(old.leases, new.leases, strict=True)
        if row != before
    )


def shard_delta(old: State, new: State) -> tuple[ShardDelta, ...]:
    """Changed shard rows, ascending by shard."""
    return tuple(
        ShardDelta(row.shard, row.blobs) for before, row in zip(old.shards, new.shards, strict=True) if row != before
    )


def apply_roster_delta(old: tuple[RosterRow, ...], body: Body) -> tuple[RosterRow, ...]:
    """The roster after a body. Raises RemoteProtocolError if the delta does not lead to the body's root."""
    peers = (*(row.peer for row in old), *body.newcomers)
    rows = {row.peer: row for row in old}
    try:
        for change in body.roster_delta:
            peer = peers[change.who]
            if change.gone:
                rows.pop(peer)
            else:
                rows[peer] = RosterRow(
                    peer,
                    change.capacity,
                    change.accepted,
                    change.base_round,
                    change.last_item_round,
                    change.voter_since,
                )
    except (IndexError, KeyError) as error:
        raise RemoteProtocolError(None, "a delta names a row that does not exist") from error
    new = tuple(rows[peer] for peer in sorted(rows))
    if roster_root(new) != body.roster_root:
        raise RemoteProtocolError(None, "the deltas do not lead to the roots of the body")
    return new


def apply_deltas(old: State, body: Body) -> State:
    """The state after a body. Raises RemoteProtocolError if the deltas do not lead to the body's roots."""
    peers = (*old.members, *body.newcomers)
    roster = apply_roster_delta(old.roster, body)
    try:
        leases = list(old.leases)
        for lease in body.lease_delta:
            owners = []
            for tenure in lease.owners:
                if not isinstance(tenure.who, int):
                    raise RemoteProtocolError(None, "a lease delta names an owner by key")
                owners.append(Tenure(peers[tenure.who], tenure.begun, tenure.last))
            leases[lease.shard] = LeaseRow(lease.shard, tuple(owners))
        shards = list(old.shards)
        for shard in body.shard_delta:
            shards[shard.shard] = ShardRow(shard.shard, shard.blobs)
    except (IndexError, KeyError) as error:
        raise RemoteProtocolError(None, "a delta names a row that does not exist") from error
    new = State(roster, tuple(leases), tuple(shards))
    if (_root("leases", new.leases), _root("shards", new.shards)) != (body.lease_root, body.shard_root):
        raise RemoteProtocolError(None, "the deltas do not lead to the roots of the body")
    return new
