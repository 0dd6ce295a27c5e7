"""What makes a statement and a cut valid in a round. Raises RemoteProtocolError for what is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol import evidence
from spes_p2p.protocol.body import Cut, CutItem
from spes_p2p.protocol.codec import check_signature, statement_hash, unpack_float
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import (
    Alive,
    Claim,
    Evidence,
    Join,
    Leave,
    Manifest,
    Piece,
    Receipt,
    Signed,
    SignedBody,
    Statement,
)
from spes_p2p.protocol.params import LATE_ROUNDS, MAX_SQUARED_NORM, STATEMENT_ROUNDS
from spes_p2p.protocol.roster import admitted
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind

STATEMENT_TYPES = (Manifest, Alive, Join, Leave, Claim, Evidence)
_KINDS: Mapping[type[Statement], ItemKind] = {
    Manifest: ItemKind.UPDATE,
    Alive: ItemKind.ALIVE,
    Join: ItemKind.JOIN,
    Leave: ItemKind.LEAVE,
    Claim: ItemKind.CLAIM,
    Evidence: ItemKind.EVIDENCE,
}


TENTATIVE_KINDS = frozenset({ItemKind.UPDATE, ItemKind.ALIVE, ItemKind.CLAIM})
"""What may be in a tentative cut: nothing that changes the roster."""

Slot: TypeAlias = tuple[ItemKind, PeerId, int]
"""Kind; author, or the accused of evidence; base round of an update, 0 for all else. One item of a cut for each."""


def slot_of(signed: Signed) -> Slot:
    """The slot that a statement fills. Raises RemoteProtocolError for what is no statement."""
    body = signed.body
    match body:
        case Manifest():
            return ItemKind.UPDATE, signed.peer, body.round
        case Evidence():
            return ItemKind.EVIDENCE, evidence.named(body), 0
        case Alive() | Join() | Leave() | Claim():
            return kind_of(body), signed.peer, 0
        case _:
            raise RemoteProtocolError(signed.peer, f"a {body.tag} is no statement")


def kind_of(statement: Statement) -> ItemKind:
    """The kind of cut item a statement becomes (a manifest without receipt becomes ALIVE)."""
    return _KINDS[type(statement)]


def check_statement(terms: Terms, signed: Signed, verifier: Verifier) -> None:
    """Whether this statement may be an item of this round's cut; evidence against a stranger only beside its join."""
    body, peer = signed.body, signed.peer
    if not isinstance(body, STATEMENT_TYPES):
        raise RemoteProtocolError(peer, f"a {body.tag} is no statement")
    if (body.run, body.epoch) != (terms.head.run.run_id, terms.head.epoch):
        raise RemoteProtocolError(peer, f"{body.tag} of another run or epoch")
    if not isinstance(body, Join) and peer not in terms.member_set:
        raise RemoteProtocolError(peer, f"{body.tag} of a peer that is not a member")
    check_signature(signed, verifier)
    match body:
        case Manifest():
            _check_manifest(terms, peer, body)
        case Alive():
            _check_round(terms, peer, body.tag, body.round, 0)
        case Join():
            _check_round(terms, peer, body.tag, body.round, STATEMENT_ROUNDS)
            if not admitted(terms.head.run, peer, body, verifier):
                raise RemoteProtocolError(peer, f"join is not admitted ({terms.config.protocol.admission} run)")
        case Leave() | Claim():
            _check_round(terms, peer, body.tag, body.round, STATEMENT_ROUNDS)
            row = terms.head.state.row(peer)
            if isinstance(body, Leave) and row is not None and body.round < row.last_item_round:
                # it has been served: else whoever comes back at once could be thrown out by it again
                raise RemoteProtocolError(peer, "leave from before its peer was last there")
        case _:  # evidence
            _check_round(terms, peer, body.tag, body.round, STATEMENT_ROUNDS)
            evidence.accused(body, verifier)


def _check_round(terms: Terms, peer: PeerId, tag: str, round_number: int, past_rounds: int) -> None:
    if not terms.round - past_rounds <= round_number <= terms.round:
        raise RemoteProtocolError(peer, f"{tag} of round {round_number} in round {terms.round}")


def _check_manifest(terms: Terms, peer: PeerId, manifest: Manifest) -> None:
    _check_round(terms, peer, manifest.tag, manifest.round, LATE_ROUNDS)
    if (manifest.round - 1, manifest.prev) not in terms.head.recent:
        raise RemoteProtocolError(peer, f"update of round {manifest.round} is based on another certificate")
    num_parts = terms.head.run.sizes.num_parts
    psi, experts = manifest.pieces[:num_parts], manifest.pieces[num_parts:]
    if [(piece.kind, piece.index) for piece in psi] != [(PieceKind.PSI, part) for part in range(num_parts)]:
        raise RemoteProtocolError(peer, "update does not have every part of psi, in order")
    shards = [piece.index for piece in experts]
    if any(piece.kind is not PieceKind.EXPERT for piece in experts) or shards != sorted(set(shards)):
        raise RemoteProtocolError(peer, "update does not list its shards once each, ascending")
    if shards and shards[-1] >= terms.head.run.sizes.num_shards:
        raise RemoteProtocolError(peer, f"update has shard {shards[-1]}, which does not exist")
    for piece in manifest.pieces:
        _check_piece(terms, peer, piece)


def _check_piece(terms: Terms, peer: PeerId, piece: Piece) -> None:
    """Size and stated norm are such that nothing worse than a refusal can come of them."""
    sizes = terms.head.run.sizes
    most = sizes.psi_piece_bytes if piece.kind is PieceKind.PSI else sizes.expert_blob_bytes
    if piece.size_bytes > most:
        raise RemoteProtocolError(peer, f"update has a piece of {piece.size_bytes} bytes; {most} are the most")
    norm = unpack_float(piece.squared_norm)
    if not (math.isfinite(norm) and 0.0 <= norm <= MAX_SQUARED_NORM):
        raise RemoteProtocolError(peer, "update states a squared norm that no delta has")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A cut item with the statement it names."""

    entry: CutItem
    signed: Signed

    @property
    def manifest(self) -> Manifest:
        """The update's manifest."""
        if not isinstance(self.signed.body, Manifest):
            raise RemoteProtocolError(self.signed.peer, "an update item without a manifest")
        return self.signed.body

    @property
    def slot(self) -> Slot:
        """The slot it takes in the cut; a manifest without receipt takes that of `Alive`."""
        if self.entry.kind is ItemKind.ALIVE:
            return ItemKind.ALIVE, self.entry.peer, 0
        return slot_of(self.signed)


def item_sort_key(entry: CutItem) -> tuple[int, bytes, bytes]:
    """Order of the items of a cut."""
    return entry.kind, entry.peer, entry.statement


def check_cut(terms: Terms, cut: Cut, items: tuple[Item, ...], receipts: Mapping[Digest, Receipt]) -> None:
    """Objective checks of a cut whose statements are known and valid, and whose receipts are known and valid."""
    if (cut.run, cut.epoch, cut.round) != (terms.head.run.run_id, terms.head.epoch, terms.round):
        raise RemoteProtocolError(None, "cut of another round")
    keys = [item_sort_key(entry) for entry in cut.items]
    if keys != sorted(set(keys)):
        raise RemoteProtocolError(None, "the items of the cut are not sorted")
    if terms.tentative and any(entry.kind not in TENTATIVE_KINDS for entry in cut.items):
        raise RemoteProtocolError(None, "a tentative cut that would change the roster")
    once: set[Slot] = set()
    concerned = terms.member_set | {entry.peer for entry in cut.items if entry.kind is ItemKind.JOIN}
    for item in items:
        entry, body = item.entry, item.signed.body
        if statement_hash(item.signed) != entry.statement or item.signed.peer != entry.peer:
            raise RemoteProtocolError(None, "a cut item names another statement")
        if item.slot in once:
            raise RemoteProtocolError(None, "the cut has two items for one slot")
        once.add(item.slot)
        if entry.kind is ItemKind.UPDATE:
            row = terms.head.state.row(entry.peer)
            receipt = receipts.get(entry.receipt)
            if receipt is None or receipt.manifest != entry.statement:
                raise RemoteProtocolError(None, "an update in the cut has no receipt")
            if row is None or item.manifest.round <= row.base_round:
                raise RemoteProtocolError(None, "an update in the cut is older than its peer's newest")
        elif entry.receipt != NO_DIGEST or not _fits(terms, entry.kind, body):
            raise RemoteProtocolError(None, "a cut item has the wrong kind")
        if entry.kind is ItemKind.EVIDENCE and item.slot[1] not in concerned:
            raise RemoteProtocolError(None, "evidence in the cut against a peer that is no member and does not join")


def _fits(terms: Terms, kind: ItemKind, body: SignedBody) -> bool:
    if kind is ItemKind.ALIVE:
        # a manifest of an older round says nothing about this one
        return isinstance(body, Alive | Manifest) and body.round == terms.round
    return isinstance(body, STATEMENT_TYPES) and kind_of(body) is kind
