"""From a certificate and a cut to the next body: the state is a pure function of certificates.

Everything but the part results and the merge lists follows from (terms, cut); docs/protocol.md, sections 6 to 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.digests import digest, digest_of_list
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol import evidence
from spes_p2p.protocol.body import BlobShare, Body, Entry, Remark
from spes_p2p.protocol.codec import bitmap, pack_float, unpack_float
from spes_p2p.protocol.head import Terms, psi_digest
from spes_p2p.protocol.leases import next_leases
from spes_p2p.protocol.messages import Claim, Evidence, Join, Manifest, Piece
from spes_p2p.protocol.roster import RosterChange, next_roster
from spes_p2p.protocol.state import (
    LeaseRow,
    ShardRow,
    State,
    bytes_of,
    lease_delta,
    numbering,
    roots,
    roster_delta,
    shard_delta,
    shard_row_hash,
)
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind, RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One psi delta of the mean, by its pieces."""

    peer: PeerId
    manifest: Digest
    pieces: tuple[Piece, ...]
    """One per part, in order."""
    weight: float
    clip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What a cut makes of a head, apart from part results and merge lists."""

    cut: Digest
    entries: tuple[Entry, ...]
    newcomers: tuple[PeerId, ...]
    refused: tuple[Remark, ...]
    carried: tuple[Remark, ...]
    state: State
    contributions: tuple[Contribution, ...]
    """Sorted by peer."""
    updates_hash: Digest
    """Identifies the contributions: part digests are over it."""
    receipts_root: Digest
    merge_alpha: float
    """0.0: no merge."""
    inner_steps: int
    global_step: int
    data_cursor: int
    tokens: int
    loss_micronats: int


def weight_tokens(terms: Terms, manifest: Manifest) -> int:
    """min(tokens, H * batch tokens), at least 1."""
    return max(1, min(manifest.tokens, terms.head.inner_steps * terms.config.training.batch_tokens))


def updates_hash(terms: Terms, items: tuple[Item, ...]) -> Digest:
    """Hash of the update items of a cut on this tip: another leader or a new join changes nothing of it."""
    updates = [item.entry.statement for item in items if item.entry.kind is ItemKind.UPDATE]
    return digest_of_list("spes updates", [terms.head.hash, *updates])


def advance(terms: Terms, cut: Digest, items: tuple[Item, ...], verifier: Verifier) -> Transition:
    """Apply a checked cut (`statements.check_cut`) to the head of `terms`."""
    accepted, refused = _accept(items)
    shards, delivered = _enter_experts(terms, items, accepted, refused)
    change = _roster_change(terms, items, accepted, verifier)
    roster = next_roster(terms, change)
    members = {row.peer for row in roster}
    asking = {item.signed.peer for item in items if isinstance(item.signed.body, Claim | Join)} & members
    leases, served = next_leases(terms, roster, delivered, frozenset(asking), change.present)
    carried = tuple(
        Remark(place, RefusalReason.NOTHING_VACANT)
        for place, item in enumerate(items)
        if item.entry.kind is ItemKind.CLAIM and item.signed.peer in members - served
    )
    state = State(roster, leases, shards)
    newcomers = tuple(sorted(change.joining))
    places = numbering(terms.head.state, newcomers)
    steps = terms.head.inner_steps if accepted else 0
    global_step = terms.head.global_step + steps
    batch_tokens = terms.config.training.batch_tokens
    manifests = [items[place].manifest for place in sorted(accepted.values())]
    tokens = sum(weight_tokens(terms, manifest) for manifest in manifests)
    loss = sum(manifest.loss_micronats * weight_tokens(terms, manifest) for manifest in manifests)
    return Transition(
        cut=cut,
        entries=tuple(_entry(item, places) for item in items),
        newcomers=newcomers,
        refused=tuple(Remark(place, refused[place]) for place in sorted(refused)),
        carried=carried,
        state=state,
        contributions=_contributions(terms, items, accepted),
        updates_hash=updates_hash(terms, items),
        receipts_root=digest_of_list(
            "spes receipts", [item.entry.receipt for item in items if item.entry.kind is ItemKind.UPDATE]
        ),
        merge_alpha=terms.config.merge_alpha(terms.head.global_step, global_step),
        inner_steps=terms.config.training.inner_steps_at(global_step),
        global_step=global_step,
        data_cursor=terms.head.data_cursor + len(terms.members) * steps * batch_tokens,
        tokens=tokens,
        loss_micronats=loss // tokens if tokens else 0,
    )


def make_body(terms: Terms, transition: Transition, parts: tuple[Digest | None, ...], merge_lists: bytes) -> Body:
    """The body of the round. `parts`: result per part, None for a part that keeps its previous value."""
    old, new = terms.head, transition.state
    places = numbering(old.state, transition.newcomers)
    digests = tuple(now or before for now, before in zip(parts, old.parts, strict=True))
    roster_root, lease_root, shard_root = roots(new)
    clips = terms.config.protocol.robust == "clipped"
    return Body(
        version=PROTOCOL_VERSION,
        run=old.run.run_id,
        epoch=old.epoch,
        round=terms.round,
        prev=old.hash if terms.tentative else old.last_final.hash,
        via=NO_DIGEST if terms.tentative or old.is_final else old.hash,
        final=not terms.tentative,
        side=terms.side_bitmap,
        seed=terms.seed,
        cut=transition.cut,
        entries=transition.entries,
        newcomers=transition.newcomers,
        refused=transition.refused,
        carried=transition.carried,
        roster_root=roster_root,
        lease_root=lease_root,
        shard_root=shard_root,
        roster_delta=roster_delta(old.state, new, places),
        lease_delta=lease_delta(old.state, new, places),
        shard_delta=shard_delta(old.state, new),
        parts=digests,
        psi=psi_digest(digests),
        kept=bitmap({part for part, now in enumerate(parts) if now is None}, len(parts)),
        merge_alpha=pack_float(transition.merge_alpha) if transition.merge_alpha else b"",
        merge_root=merge_root(merge_lists) if transition.merge_alpha else NO_DIGEST,
        clip=tuple(pack_float(c.clip) for c in transition.contributions) if clips else (),
        receipts_root=transition.receipts_root,
        inner_steps=transition.inner_steps,
        global_step=transition.global_step,
        data_cursor=transition.data_cursor,
        tokens=transition.tokens,
        loss_micronats=transition.loss_micronats,
    )


def merge_root(merge_lists: bytes) -> Digest:
    """Root of the merge lists."""
    return digest("spes merge lists", merge_lists)


def _accept(items: tuple[Item, ...]) -> tuple[dict[PeerId, int], dict[int, RefusalReason]]:
    """Place of each peer's newest update in the cut; its older ones are superseded."""
    newest: dict[PeerId, int] = {}
    refused: dict[int, RefusalReason] = {}
    for place, item in enumerate(items):
        if item.entry.kind is not ItemKind.UPDATE:
            continue
        other = newest.get(item.signed.peer)
        if other is None or items[other].manifest.round < item.manifest.round:
            newest[item.signed.peer] = place
        loser = place if newest[item.signed.peer] != place else other
        if loser is not None:
            refused[loser] = RefusalReason.SUPERSEDED
    return newest, refused


def _enter_experts(
    terms: Terms, items: tuple[Item, ...], accepted: dict[PeerId, int], refused: dict[int, RefusalReason]
) -> tuple[tuple[ShardRow, ...], dict[int, frozenset[PeerId]]]:
    """Shard rows after the cut, and per shard the owners that delivered. Adds to `refused` what may not enter."""
    state = terms.head.state
    blobs: dict[int, list[BlobShare]] = {}
    delivered: dict[int, set[PeerId]] = {}
    for peer, place in sorted(accepted.items()):
        manifest = items[place].manifest
        for piece in manifest.pieces:
            if piece.kind is not PieceKind.EXPERT:
                continue
            reason = _expert_refusal(state.leases[piece.index], state.shards[piece.index], peer, manifest, piece)
            if reason is not None:
                refused[place] = reason
                continue
            blobs.setdefault(piece.index, []).append(BlobShare(piece.blob, weight_tokens(terms, manifest)))
            delivered.setdefault(piece.index, set()).add(peer)
    rows = tuple(
        ShardRow(row.shard, tuple(sorted(blobs[row.shard], key=lambda share: (share.blob, share.tokens))))
        if row.shard in blobs
        else row
        for row in state.shards
    )
    return rows, {shard: frozenset(peers) for shard, peers in delivered.items()}


def _expert_refusal(
    lease: LeaseRow, row: ShardRow, peer: PeerId, manifest: Manifest, piece: Piece
) -> RefusalReason | None:
    tenure = next((owner for owner in lease.owners if bytes_of(owner) == peer), None)
    if tenure is None or tenure.begun >= manifest.round:
        return RefusalReason.NOT_OWNER
    if piece.base_row != shard_row_hash(row):
        return RefusalReason.BASE_ROW
    return None


def _roster_change(
    terms: Terms, items: tuple[Item, ...], accepted: dict[PeerId, int], verifier: Verifier
) -> RosterChange:
    capacities = {
        item.signed.peer: item.signed.body.capacity for item in items if isinstance(item.signed.body, Claim | Join)
    }
    members = set(terms.members)
    return RosterChange(
        present=frozenset(item.signed.peer for item in items if item.entry.kind is not ItemKind.EVIDENCE),
        leaving=frozenset(item.signed.peer for item in items if item.entry.kind is ItemKind.LEAVE),
        evicted=frozenset(
            evidence.accused(item.signed.body, verifier) for item in items if isinstance(item.signed.body, Evidence)
        ),
        joining={
            item.signed.peer: item.signed.body.capacity
            for item in items
            if isinstance(item.signed.body, Join) and item.signed.peer not in members
        },
        capacities=capacities,
        accepted_bases={peer: (items[place].manifest.round,) for peer, place in accepted.items()},
    )


def _entry(item: Item, places: dict[PeerId, int]) -> Entry:
    tokens = item.manifest.tokens if item.entry.kind is ItemKind.UPDATE else 0
    return Entry(item.entry.kind, places[item.signed.peer], item.entry.statement, tokens)


def psi_squared_norm(manifest: Manifest) -> float:
    """Stated squared norm of the whole psi delta: the sum over its pieces, in order."""
    total = 0.0
    for piece in manifest.pieces:
        if piece.kind is PieceKind.PSI:
            total += unpack_float(piece.squared_norm)
    return total


def _contributions(terms: Terms, items: tuple[Item, ...], accepted: dict[PeerId, int]) -> tuple[Contribution, ...]:
    protocol = terms.config.protocol
    norms = {}
    if protocol.robust == "clipped":
        norms = {peer: math.sqrt(psi_squared_norm(items[place].manifest)) for peer, place in accepted.items()}
    limit = protocol.clip_ratio * _median(sorted(norms.values())) if norms else 0.0
    found = []
    for peer, place in sorted(accepted.items()):
        manifest = items[place].manifest
        weight = float(weight_tokens(terms, manifest)) if protocol.weighted_by_tokens else 1.0
        clips = peer in norms and norms[peer] > limit
        found.append(
            Contribution(
                peer=peer,
                manifest=items[place].entry.statement,
                pieces=tuple(piece for piece in manifest.pieces if piece.kind is PieceKind.PSI),
                weight=weight * 0.5 ** (terms.round - manifest.round),
                clip=limit / norms[peer] if clips else 1.0,
            )
        )
    return tuple(found)


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0
