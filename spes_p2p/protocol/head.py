"""`Head`: everything the next round follows from, and `Terms`: the roles and thresholds of that round.

A head is made from the run manifest (certificate 0) or from the previous head and a body, by pure functions, so that
all peers, joiners included, have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from spes_p2p.config import RunConfig
from spes_p2p.digests import digest, digest_of_list
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.protocol import election
from spes_p2p.protocol.body import BlobShare, Body
from spes_p2p.protocol.codec import FLOAT_BYTES, bitmap, bits, body_hash, run_id, unpack_float
from spes_p2p.protocol.messages import RunManifest
from spes_p2p.protocol.params import (
    LATE_ROUNDS,
    MAX_MEMBERS_WHO_HEAR_ALL,
    MIN_BYZANTINE_VOTERS,
    STATEMENT_ROUNDS,
    PieceSizes,
    expert_acks,
    faults,
    psi_acks,
    quorum,
    replicas,
    transfer_budget_ms,
)
from spes_p2p.protocol.state import LeaseRow, RosterRow, ShardRow, State, apply_deltas
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind


@dataclass(frozen=True, kw_only=True)
class Run:
    """What never changes in a run."""

    run_id: RunId
    manifest: RunManifest
    config: RunConfig
    sizes: PieceSizes

    @cached_property
    def founders(self) -> frozenset[PeerId]:
        """The founders, for looking up."""
        return frozenset(self.manifest.founders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The adopted certificate and the state it made. A *height* is everything after one final certificate."""

    run: Run
    hash: Digest
    round: int
    epoch: int
    seed: Digest
    """seed of `round`."""
    state: State
    parts: tuple[Digest, ...]
    inner_steps: int
    """H of the next round."""
    global_step: int
    data_cursor: int
    merge_alpha: float = 0.0
    merge_root: Digest = NO_DIGEST
    delivered: tuple[int, ...] = ()
    """Shards whose row this certificate changed: an update of each is in its cut."""
    served: tuple[tuple[int, tuple[Digest, ...]], ...] = field(default=(), compare=False)
    """(round, statements that its certificate dealt with for good) of the newest certificates, as far as known here."""
    recent: tuple[tuple[int, Digest], ...] = ()
    """(round, certificate hash) of the newest certificates, this one included: the fencing tokens that are valid."""
    present: frozenset[PeerId] = frozenset()
    """Members with an item in this certificate's cut; at genesis all founders."""
    tokens: int = 0
    """Of the accepted updates."""
    side: tuple[PeerId, ...] = ()
    """The voters that made a tentative certificate, by peer id; empty: this one is final."""
    forked: int = field(default=0, compare=False)
    """For how many more final rounds an honest peer may not know better than to build on another branch."""
    base: Head | None = field(default=None, compare=False, repr=False)
    """What a tentative certificate builds on."""
    trunk: Head | None = field(default=None, compare=False, repr=False)
    """The last final certificate before a tentative one."""

    @property
    def psi_digest(self) -> Digest:
        """Digest of the shared modules."""
        return psi_digest(self.parts)

    def receivers(self) -> tuple[bool, ...]:
        """Per shard: whether an update of it is in this certificate, so that a merge changes it."""
        return tuple(row.shard in self.delivered for row in self.state.shards)

    @property
    def is_final(self) -> bool:
        """Whether a quorum of all voters made it; else it is tentative."""
        return self.trunk is None

    @property
    def last_final(self) -> Head:
        """The last final certificate: this one, or the one that the branch begins at."""
        return self if self.trunk is None else self.trunk

    @property
    def height(self) -> int:
        """Round after the last final certificate: number of the final voting that is open."""
        return self.last_final.round + 1

    @property
    def num_tentative(self) -> int:
        """Tentative certificates after the last final one, this one included."""
        return self.round - self.last_final.round

    def has_passed(self, other: Head) -> bool:
        """Whether another certificate of this height is behind this one."""
        return other.hash in {known.hash for known in (self.last_final, *self.branch)} - {self.hash}

    @property
    def branch(self) -> tuple[Head, ...]:
        """The tentative certificates after the last final one, oldest first, this one included."""
        found: list[Head] = []
        head: Head | None = self
        while head is not None and head.trunk is not None:
            found.append(head)
            head = head.base
        return tuple(reversed(found))


def psi_digest(parts: tuple[Digest, ...]) -> Digest:
    """BLAKE3 over the part digests."""
    return digest_of_list("spes psi", parts)


def genesis_head(manifest: RunManifest, sizes: PieceSizes) -> Head:
    """Head of certificate 0. Raises RemoteProtocolError if the manifest contradicts itself."""
    config = RunConfig.from_json(manifest.config)
    if list(manifest.founders) != sorted(set(manifest.founders)):
        raise RemoteProtocolError(manifest.created_by, "founders are not sorted by peer id")
    if len(manifest.shards) != config.num_shards or len(manifest.parts) != sizes.num_parts:
        raise RemoteProtocolError(manifest.created_by, "the genesis blobs do not fit the configuration")
    identity = run_id(manifest)
    state = State(
        roster=tuple(RosterRow(peer, 0, 0, 0, 0, 0) for peer in manifest.founders),
        leases=tuple(LeaseRow(shard, ()) for shard in range(config.num_shards)),
        shards=tuple(ShardRow(shard, (BlobShare(blob, 1),)) for shard, blob in enumerate(manifest.shards)),
    )
    return Head(
        run=Run(run_id=identity, manifest=manifest, config=config, sizes=sizes),
        hash=Digest(identity),
        round=0,
        epoch=0,
        seed=election.first_seed(identity),
        state=state,
        parts=manifest.parts,
        inner_steps=config.training.inner_steps_at(0),
        global_step=0,
        data_cursor=0,
        recent=((0, Digest(identity)),),
        present=frozenset(manifest.founders),
    )


def next_head(head: Head, body: Body) -> Head:
    """Head after a certified body that extends `head`. Raises RemoteProtocolError if it does not extend it."""
    trunk = head.last_final
    recovers = body.final and body.epoch == head.epoch + 1
    via = NO_DIGEST if head.is_final else head.hash
    links = (trunk.hash, via) if body.final else (head.hash, NO_DIGEST)
    if (body.run, body.round, body.prev, body.via) != (head.run.run_id, head.round + 1, *links) or (
        body.epoch != head.epoch and not recovers
    ):
        raise RemoteProtocolError(None, f"body of round {body.round} does not extend round {head.round}")
    after = head_after(head.run, body, apply_deltas(head.state, body), head.recent, head.served)
    forked = LATE_ROUNDS + 1 if not body.final or body.via != NO_DIGEST else max(0, head.forked - 1)
    if body.final:
        return replace(after, forked=forked)
    present = _present(head, body) & frozenset(after.state.members)
    return replace(after, forked=forked, present=present, side=side_of(head, body.side), base=head, trunk=trunk)


def served_by(body: Body) -> tuple[Digest, ...]:
    """Statements that a certificate has dealt with for good: no cut needs them again."""
    carried = {remark.entry for remark in body.carried}
    return tuple(
        entry.statement
        for place, entry in enumerate(body.entries)
        if place not in carried and entry.kind is not ItemKind.ALIVE
    )


def head_after(
    run: Run,
    body: Body,
    state: State,
    recent: tuple[tuple[int, Digest], ...],
    served: tuple[tuple[int, tuple[Digest, ...]], ...] = (),
) -> Head:
    """Head after a certified final body. `state`: the tables that it makes, checked against its roots; `recent`: of
    the head before it. Raises RemoteProtocolError for a malformed alpha."""
    if len(body.merge_alpha) not in (0, FLOAT_BYTES):
        raise RemoteProtocolError(None, "the merge alpha is no float64")
    identity = body_hash(body)
    return Head(
        run=run,
        hash=identity,
        round=body.round,
        epoch=body.epoch,
        seed=body.seed,
        state=state,
        parts=body.parts,
        inner_steps=body.inner_steps,
        global_step=body.global_step,
        data_cursor=body.data_cursor,
        merge_alpha=unpack_float(body.merge_alpha) if body.merge_alpha else 0.0,
        merge_root=body.merge_root,
        delivered=tuple(change.shard for change in body.shard_delta),
        served=(*served, (body.round, served_by(body)))[-(max(STATEMENT_ROUNDS, LATE_ROUNDS) + 1) :],
        recent=(*recent, (body.round, identity))[-(LATE_ROUNDS + 1) :],
        present=frozenset(row.peer for row in state.roster if row.last_item_round == body.round),
        tokens=body.tokens,
    )


def _present(head: Head, body: Body) -> frozenset[PeerId]:
    """Peers with an item of any kind but evidence in the cut behind a body."""
    peers = (*head.state.members, *body.newcomers)
    places = [entry.who for entry in body.entries if entry.kind is not ItemKind.EVIDENCE]
    if any(place >= len(peers) for place in places):
        raise RemoteProtocolError(None, "an entry of the body names nobody")
    return frozenset(peers[place] for place in places)


def side_of(head: Head, side: bytes) -> tuple[PeerId, ...]:
    """The voters that a bitmap names, by peer id. Raises RemoteProtocolError for a malformed bitmap."""
    voters = head.last_final.state.voters
    return tuple(voters[index] for index in sorted(bits(side, len(voters))))


def may_go_on(head: Head, side: tuple[PeerId, ...]) -> bool:
    """Whether these voters may make a tentative certificate on top of `head`.

    At least f + 1, so that one of them is honest; fewer than a quorum, which would make final ones; and, where there
    are 4 voters or more, only so many after a final certificate.
    """
    voters = head.last_final.state.voters
    enough = faults(len(voters)) < len(side) < quorum(len(voters)) and set(side) <= set(voters)
    few = len(voters) < MIN_BYZANTINE_VOTERS or head.num_tentative < head.run.config.protocol.max_tentative
    return enough and few


@dataclass(frozen=True)
class Terms:
    """Roles and thresholds of the round that follows a head.

    Without a `side` the round may end with a final certificate: its *ballot* is that of the height, which lasts over
    all tentative certificates after one final. With a side it is a tentative attempt of these voters alone, and the
    ballot is its own.
    """

    head: Head
    side: tuple[PeerId, ...] = ()
    round: int = field(init=False)
    seed: Digest = field(init=False)

    def __post_init__(self) -> None:
        head = self.head
        object.__setattr__(self, "round", head.round + 1)
        seed = election.next_seed(head.run.run_id, head.round + 1, head.seed, head.hash)
        object.__setattr__(self, "seed", seed)

    @cached_property
    def served(self) -> frozenset[Digest]:
        """Statements that the newest certificates have dealt with: one that comes again, late or twice, is not news."""
        return frozenset(statement for _, statements in self.head.served for statement in statements)

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.head.run.config

    @property
    def tentative(self) -> bool:
        """Whether this is a tentative attempt."""
        return bool(self.side)

    @property
    def height(self) -> int:
        """Round after the last final certificate."""
        return self.head.height

    @property
    def ballot_round(self) -> int:
        """What votes and the like name as their round: the height, or the round of a tentative attempt."""
        return self.round if self.tentative else self.height

    @cached_property
    def side_bitmap(self) -> bytes:
        """The side over all voters; empty for a final ballot."""
        if not self.tentative:
            return b""
        voters = self.all_voters
        return bitmap({place for place, peer in enumerate(voters) if peer in self.side}, len(voters))

    @cached_property
    def branch(self) -> bytes:
        """Name of the tentative attempt; empty for a final ballot."""
        return digest("spes branch", self.head.hash, self.side_bitmap) if self.tentative else b""

    @cached_property
    def members(self) -> tuple[PeerId, ...]:
        """The roster, by peer id."""
        return self.head.state.members

    @cached_property
    def all_voters(self) -> tuple[PeerId, ...]:
        """The voters of the height, by peer id."""
        return self.head.state.voters

    @cached_property
    def voters(self) -> tuple[PeerId, ...]:
        """Who votes in this ballot, by peer id; bit i of a voter bitmap is the i-th."""
        return self.side or self.all_voters

    @cached_property
    def eligible(self) -> tuple[PeerId, ...]:
        """Who acknowledges and aggregates, by peer id. The silent voters of a tentative attempt do not, nor do members
        that were not in the last cut."""
        if not self.tentative:
            return election.eligible(self.seed, self.voters, self.members)
        return election.eligible(self.seed, self.side, self.live - set(self.all_voters))

    @cached_property
    def eligible_set(self) -> frozenset[PeerId]:
        """The eligible, for looking up."""
        return frozenset(self.eligible)

    @cached_property
    def audience(self) -> tuple[PeerId, ...]:
        """Who gets everybody's statements and receipts."""
        return self.members if len(self.members) <= MAX_MEMBERS_WHO_HEAR_ALL else self.eligible

    @cached_property
    def criers(self) -> tuple[PeerId, ...]:
        """Who tells the members outside the audience when half of the manifests are in: f + 1 of them are honest."""
        return self.leaders[: 2 * self.num_faults + 1]

    @cached_property
    def leaders(self) -> tuple[PeerId, ...]:
        """Order of leaders. That of the final voting stays the same for the whole height."""
        trunk = self.head.last_final
        if self.tentative or self.head.is_final:
            return election.leaders(self.seed, self.voters)
        seed = election.next_seed(trunk.run.run_id, self.height, trunk.seed, trunk.hash)
        return election.leaders(seed, self.voters)

    @cached_property
    def aggregators(self) -> tuple[tuple[PeerId, ...], ...]:
        """Per part, the order of aggregators."""
        parts = range(self.head.run.sizes.num_parts)
        return tuple(election.aggregators(self.seed, part, self.eligible) for part in parts)

    @cached_property
    def _places(self) -> dict[PeerId, tuple[int, ...]]:
        orders = [{peer: place for place, peer in enumerate(order)} for order in self.aggregators]
        return {peer: tuple(order[peer] for order in orders) for peer in self.eligible}

    def places(self, peer: PeerId) -> tuple[int, ...]:
        """Per part, where an eligible peer stands in the order of aggregators."""
        return self._places[peer]

    def leader(self, view: int) -> PeerId:
        """Who names the cut and proposes in a view."""
        if not self.leaders:
            raise LocalProtocolError("a run without members has no leader")
        return self.leaders[view % len(self.leaders)]

    @cached_property
    def member_set(self) -> frozenset[PeerId]:
        """The roster, for looking up."""
        return frozenset(self.members)

    @cached_property
    def voter_set(self) -> frozenset[PeerId]:
        """The voters, for looking up."""
        return frozenset(self.voters)

    @cached_property
    def num_faults(self) -> int:
        """f, of all voters: a side may have all the liars among it."""
        return faults(len(self.all_voters))

    @cached_property
    def quorum(self) -> int:
        """q; of a side also more than f."""
        return max(quorum(len(self.voters)), self.num_faults + 1)

    @cached_property
    def replicas(self) -> int:
        """Equal digests needed per part."""
        return replicas(self.config.protocol, len(self.all_voters), len(self.eligible))

    @cached_property
    def expert_acks(self) -> int:
        """Acks of others for an expert blob."""
        return expert_acks(len(self.all_voters), len(self.eligible))

    @cached_property
    def psi_acks(self) -> int:
        """Acks of others for a psi piece."""
        return psi_acks(self.replicas, len(self.eligible))

    @cached_property
    def transfer_budget_ms(self) -> int:
        """T."""
        return transfer_budget_ms(
            self.config.protocol,
            self.head.run.sizes,
            num_members=len(self.members),
            num_eligible=len(self.eligible),
            num_replicas=self.replicas,
        )

    @property
    def live(self) -> frozenset[PeerId]:
        """Members with an item in the previous cut; in round 1 all founders."""
        return self.head.present
