"""Heads, statements, receipts and cuts made by hand, for tests of the protocol core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from spes_p2p.config import ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import Body, Certificate, Cut, CutItem
from spes_p2p.protocol.certificate import make_certificate
from spes_p2p.protocol.codec import (
    bitmap,
    body_hash,
    cut_hash,
    pack_float,
    receipt_hash,
    sign,
    statement_hash,
)
from spes_p2p.protocol.head import Head, Terms, genesis_head, next_head, psi_digest
from spes_p2p.protocol.messages import Ack, Alive, Claim, Join, Manifest, Piece, Receipt, Signed, Vote
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.protocol.receipts import mark_of
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.statements import STATEMENT_TYPES, Item, item_sort_key, kind_of
from spes_p2p.protocol.transition import Transition, advance, make_body
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind, Step
from spes_p2p.testing.swarm import identity_of, make_manifest

NUM_PARTS = 4

QUICK = ProtocolConfig(
    round_max_ms=40_000,
    round_min_ms=5_000,
    train_grace_ms=5_000,
    min_rate_bytes_per_s=5_000_000,
    view_timeout_base_ms=2_000,
    view_timeout_step_ms=1_000,
    resend_ms=1_000,
    parts=NUM_PARTS,
)
"""The demo's times."""


def quick_config(**changes: object) -> RunConfig:
    """A run with the demo's times, 8 shards, H = 10; `changes` go into its protocol."""
    protocol = ProtocolConfig.model_validate({**QUICK.model_dump(), **changes})
    return RunConfig(protocol=protocol, training=TrainingConfig(inner_steps=((0, 10),)))


def identities(num_peers: int) -> list[Identity]:
    """Keys of p0, p1, ..., sorted by peer id."""
    return sorted((identity_of(f"p{number}") for number in range(num_peers)), key=lambda identity: identity.peer_id)


def small_sizes(config: RunConfig) -> PieceSizes:
    """Sizes of made-up blobs."""
    return PieceSizes(
        expert_blob_bytes=100_000,
        psi_piece_bytes=10_000,
        part_result_bytes=40_000,
        num_parts=NUM_PARTS,
        num_shards=config.num_shards,
    )


def genesis_of(founders: Sequence[Identity], config: RunConfig | None = None) -> Head:
    """Head of certificate 0."""
    config = config or quick_config()
    manifest = make_manifest(config, [founder.peer_id for founder in founders], NUM_PARTS, identity_of("invite"))
    return genesis_head(manifest, small_sizes(config))


# --- statements ------------------------------------------------------------------------------------------------------


def claim_of(head: Head, peer: Identity, capacity: int = 2) -> Signed:
    """A claim of the round after `head`."""
    return sign(peer, Claim(head.run.run_id, head.epoch, head.round + 1, capacity))


def alive_of(head: Head, peer: Identity, more: bool = False) -> Signed:
    """A sign of life in the round after `head`."""
    return sign(peer, Alive(head.run.run_id, head.epoch, head.round + 1, more))


def join_of(head: Head, peer: Identity, capacity: int = 2) -> Signed:
    """A join with a valid invitation."""
    invitation = identity_of("invite").sign("invite", invite_payload(head.run.run_id, peer.peer_id))
    return sign(peer, Join(head.run.run_id, head.epoch, head.round + 1, capacity, invitation, b"", b""))


def pieces_of(head: Head, peer: PeerId, note: str = "", shards: Iterable[int] | None = None) -> tuple[Piece, ...]:
    """Pieces of an update of the round after `head`: every part, and the shards that the peer owns (or `shards`)."""
    number = head.round + 1
    psi = [
        Piece(PieceKind.PSI, part, digest(f"delta{note}", peer, number, part), 10, 0, value, pack_float(1.0))
        for part, value in enumerate(head.parts)
    ]
    owned = head.state.shards_of(peer) if shards is None else tuple(shards)
    experts = [
        Piece(
            PieceKind.EXPERT,
            shard,
            digest(f"expert{note}", peer, number, shard),
            10,
            0,
            shard_row_hash(head.state.shards[shard]),
            pack_float(1.0),
        )
        for shard in owned
    ]
    return (*psi, *experts)


def update_of(
    head: Head, peer: Identity, *, tokens: int = 1000, note: str = "", shards: Iterable[int] | None = None
) -> Signed:
    """A manifest of the round after `head`."""
    pieces = pieces_of(head, peer.peer_id, note, shards)
    number = head.round + 1
    return sign(peer, Manifest(head.run.run_id, head.epoch, number, head.hash, tokens, 10, 2_000_000, pieces))


def ack_of(update: Signed, acker: Identity, pieces: Iterable[int] | None = None) -> Signed:
    """An ack of all pieces, or of some."""
    manifest = update.body
    if not isinstance(manifest, Manifest):
        raise TypeError("not an update")
    chosen = range(len(manifest.pieces)) if pieces is None else pieces
    marks = bitmap(set(chosen), len(manifest.pieces))
    identity = statement_hash(update)
    return sign(acker, Ack(manifest.run, manifest.epoch, manifest.round, identity, marks))


def receipt_of(update: Signed, ackers: Sequence[Identity]) -> Receipt:
    """A receipt with everybody's ack but the author's, sorted by acker."""
    manifest = update.body
    if not isinstance(manifest, Manifest):
        raise TypeError("not an update")
    acks = [ack_of(update, acker) for acker in sorted(ackers, key=lambda a: a.peer_id) if acker.peer_id != update.peer]
    return Receipt(manifest.round, statement_hash(update), tuple(mark_of(ack) for ack in acks))


# --- cuts and certificates -------------------------------------------------------------------------------------------


def item_of(signed: Signed, receipt: Receipt | None = None) -> Item:
    """A cut item; a manifest without receipt becomes `ALIVE`."""
    body = signed.body
    if not isinstance(body, STATEMENT_TYPES):
        raise TypeError(f"a {body.tag} is no statement")
    kind = ItemKind.ALIVE if isinstance(body, Manifest) and receipt is None else kind_of(body)
    named = NO_DIGEST if receipt is None else receipt_hash(receipt)
    return Item(entry=CutItem(kind, signed.peer, statement_hash(signed), named), signed=signed)


def cut_of(head: Head, items: Iterable[Item]) -> tuple[Cut, tuple[Item, ...]]:
    """A cut of these items, sorted, and the items in its order."""
    chosen = tuple(sorted(items, key=lambda item: item_sort_key(item.entry)))
    cut = Cut(head.run.run_id, head.epoch, head.round + 1, tuple(item.entry for item in chosen))
    return cut, chosen


def transition_of(head: Head, items: Iterable[Item]) -> Transition:
    """What these items make of a head."""
    cut, chosen = cut_of(head, items)
    return advance(Terms(head), cut_hash(cut), chosen, verify)


def body_of(head: Head, transition: Transition, *, merge_lists: bytes = b"", kept: Iterable[int] = ()) -> Body:
    """The body, with made-up part results; all parts are kept if the cut has no update."""
    left_alone = set(kept) if transition.contributions else set(range(NUM_PARTS))
    parts: tuple[Digest | None, ...] = tuple(
        None if part in left_alone else digest("result", head.round + 1, part) for part in range(NUM_PARTS)
    )
    return make_body(Terms(head), transition, parts, merge_lists)


def vote_of(terms: Terms, voter: Identity, step: Step, body: Digest, *, view: int = 0, held: bool = False) -> Signed:
    """One vote."""
    head = terms.head
    return sign(voter, Vote(head.run.run_id, head.epoch, terms.ballot_round, view, step, body, held, terms.branch))


def certificate_of(head: Head, body: Body, voters: Sequence[Identity], merge_lists: bytes = b"") -> Certificate:
    """A certificate with the precommits of these voters."""
    return certificate_on(Terms(head), body, voters, merge_lists)


def certificate_on(terms: Terms, body: Body, voters: Sequence[Identity], merge_lists: bytes = b"") -> Certificate:
    """A certificate with the precommits of these voters in the ballot of `terms`."""
    identity = body_hash(body)
    votes: Mapping[PeerId, Signed] = {
        voter.peer_id: vote_of(terms, voter, Step.PRECOMMIT, identity) for voter in voters
    }
    return make_certificate(terms, body, 0, votes, merge_lists)


def round_of(
    head: Head, makers: Sequence[Identity], *, tentative: bool = False, trained: bool = False
) -> tuple[Certificate, Head]:
    """A round of signs of life, or of updates, of these voters, who make its certificate, and the head after it."""
    terms = Terms(head, tuple(sorted(maker.peer_id for maker in makers)) if tentative else ())
    alive = [item_of(alive_of(head, maker)) for maker in makers]
    cut, items = cut_of(head, trained_items(head, makers) if trained else alive)
    body = make_body(terms, advance(terms, cut_hash(cut), items, verify), (None,) * NUM_PARTS, b"")
    return certificate_on(terms, body, makers), next_head(head, body)


def follow(head: Head, items: Iterable[Item]) -> Head:
    """The head after a round made of these items."""
    return next_head(head, body_of(head, transition_of(head, items), merge_lists=b"lists"))


def owned_head(founders: Sequence[Identity], config: RunConfig | None = None, capacity: int = 2) -> Head:
    """Head of certificate 1: every founder has claimed."""
    head = genesis_of(founders, config)
    return follow(head, [item_of(claim_of(head, founder, capacity)) for founder in founders])


def trained_items(head: Head, peers: Sequence[Identity]) -> list[Item]:
    """An update with its receipt of each of these peers."""
    found = []
    for peer in peers:
        update = update_of(head, peer)
        found.append(item_of(update, receipt_of(update, peers)))
    return found


def kept_body(head: Head, body: Body) -> Body:
    """A body like `body` that keeps every part."""
    return structs.replace(
        body, parts=head.parts, psi=psi_digest(head.parts), kept=bitmap(set(range(len(head.parts))), len(head.parts))
    )
