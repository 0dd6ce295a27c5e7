"""Long chains made quickly: real signatures of a real quorum, over rounds that nobody lived through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity
from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.stored import entry_of, tables_of
from spes_p2p.protocol.body import BlobShare, Body, Certificate, Entry, Tenure
from spes_p2p.protocol.certificate import make_certificate
from spes_p2p.protocol.codec import body_hash, decode_certificate, encode, sign
from spes_p2p.protocol.head import Head, Terms, genesis_head, next_head
from spes_p2p.protocol.messages import Vote
from spes_p2p.protocol.params import PieceSizes, quorum
from spes_p2p.protocol.questions import Waypoint
from spes_p2p.protocol.state import LeaseRow, RosterRow, ShardRow, State
from spes_p2p.protocol.transition import Transition, make_body
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, Step
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.swarm import identity_of, make_manifest

_TOKENS = 1_000


@dataclass(slots=True)
class MadeChain:
    """A chain that grows. Every member is a voter; `peers` are those of now and before, by peer id."""

    head: Head
    peers: dict[PeerId, Identity]
    trains: bool = True
    """Every round has an update of every member, and new (made-up) blobs; otherwise nothing but signs of life."""
    turnover_every: int = 0
    """Rounds after which the longest-serving voter is replaced by a new one; 0: never."""
    genesis: Head = field(init=False)
    certificates: list[bytes] = field(default_factory=list)
    """Encoded, from round 1 on."""
    heads: dict[int, Head] = field(default_factory=dict)
    """Heads that `keep_heads` asked for, by round."""
    keep_heads: bool = False

    def __post_init__(self) -> None:
        self.genesis = self.head

    def grow(self, num_rounds: int) -> MadeChain:
        """Certify so many rounds more."""
        for _ in range(num_rounds):
            certificate = self.certify(self.body())
            self.certificates.append(encode(certificate))
            self.head = next_head(self.head, certificate.body)
            if self.keep_heads:
                self.heads[self.head.round] = self.head
        return self

    def certify(self, body: Body, signers: Sequence[Identity] | None = None) -> Certificate:
        """A body with the signatures of a quorum, the first voters by peer id, or of `signers`."""
        terms = Terms(self.head)
        if signers is None:
            signers = [self.peers[peer] for peer in terms.voters[: quorum(len(terms.voters))]]
        vote = Vote(body.run, body.epoch, body.round, 0, Step.PRECOMMIT, body_hash(body), False)
        votes = {signer.peer_id: sign(signer, vote) for signer in signers}
        return make_certificate(terms, body, 0, votes, b"")

    def waypoint(self, number: int) -> Waypoint:
        """What skips to the certificate of a round, of a chain that keeps its heads."""
        before = decode_certificate(self.certificates[number - 2]).body
        return Waypoint(decode_certificate(self.certificates[number - 1]), before, self.heads[number - 1].state.roster)

    def body(self) -> Body:
        """The next one."""
        terms = Terms(self.head)
        newcomers = self._newcomers()
        state = self._state(newcomers)
        num_parts = len(self.head.parts)
        parts: tuple[Digest | None, ...] = (None,) * num_parts
        if self.trains:
            parts = tuple(digest("made part", terms.round, part) for part in range(num_parts))
        steps = self.head.inner_steps if self.trains else 0
        return make_body(terms, self._transition(state, newcomers, steps), parts, b"")

    def _transition(self, state: State, newcomers: tuple[PeerId, ...], steps: int) -> Transition:
        number, tokens = self.head.round + 1, _TOKENS if self.trains else 0
        kind = ItemKind.UPDATE if self.trains else ItemKind.ALIVE
        entries = tuple(
            Entry(kind, place, digest("made statement", number, place), tokens)
            for place in range(len(self.head.state.roster))
        )
        return Transition(
            cut=digest("made cut", number),
            entries=entries,
            newcomers=newcomers,
            refused=(),
            carried=(),
            state=state,
            contributions=(),
            updates_hash=NO_DIGEST,
            receipts_root=NO_DIGEST,
            merge_alpha=0.0,
            inner_steps=self.head.inner_steps,
            global_step=self.head.global_step + steps,
            data_cursor=self.head.data_cursor,
            tokens=tokens * len(entries),
            loss_micronats=2_000_000 if self.trains else 0,
        )

    def _newcomers(self) -> tuple[PeerId, ...]:
        number = self.head.round + 1
        if not self.turnover_every or number % self.turnover_every:
            return ()
        newcomer = identity_of(f"newcomer of round {number}")
        self.peers[newcomer.peer_id] = newcomer
        return (newcomer.peer_id,)

    def _state(self, newcomers: tuple[PeerId, ...]) -> State:
        number, old = self.head.round + 1, self.head.state
        rows = [
            structs.replace(
                row,
                last_item_round=number,
                accepted=row.accepted + self.trains,
                base_round=number if self.trains else row.base_round,
            )
            for row in old.roster
        ]
        for newcomer in newcomers:
            rows.remove(min(rows, key=lambda row: (row.voter_since or 0, row.peer)))
            rows.append(RosterRow(newcomer, 1, 0, 0, number, number))
        roster = tuple(sorted(rows, key=lambda row: row.peer))
        if not self.trains:
            return State(roster, old.leases, old.shards)
        owners = [roster[lease.shard % len(roster)].peer for lease in old.leases]
        leases = tuple(LeaseRow(shard, (Tenure(owner, number, number),)) for shard, owner in enumerate(owners))
        shards = tuple(
            ShardRow(row.shard, (BlobShare(digest("made blob", number, row.shard), _TOKENS),)) for row in old.shards
        )
        return State(roster, leases, shards)


def made_chain(num_voters: int, config: RunConfig, num_parts: int, turnover_every: int = 0) -> MadeChain:
    """A chain of made-up founders."""
    founders = [identity_of(f"founder {number}") for number in range(num_voters)]
    manifest = make_manifest(config, [founder.peer_id for founder in founders], num_parts, identity_of("invite"))
    sizes = PieceSizes(
        expert_blob_bytes=1, psi_piece_bytes=1, part_result_bytes=1, num_parts=num_parts, num_shards=config.num_shards
    )
    peers = {founder.peer_id: founder for founder in founders}
    return MadeChain(genesis_head(manifest, sizes), peers, turnover_every=turnover_every)


def store(ledger: Ledger, genesis: Head, certificates: Sequence[Certificate]) -> Head:
    """Put a chain that is known to be good into a ledger, in one transaction. The head after it."""
    head, entries = genesis, []
    for certificate in certificates:
        head = next_head(head, certificate.body)
        entries.append((entry_of(certificate), tables_of(head)))
    ledger.extend(entries)
    return head
