"""What a certificate means for this peer's own weights: docs/protocol.md, section 7. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.protocol.codec import bits
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Certificate
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.training.start import StartSpec

MasterRule = Literal["start", "carry", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How the trainer goes from one round to the next."""

    owned: tuple[int, ...]
    masters: dict[int, MasterRule]
    residual: Literal["advance", "keep"]
    accepted_update: int | None
    """Base round of this peer's update that the certificate accepted."""
    kept_parts: tuple[int, ...]


def start_spec(head: Head, merge_lists: bytes) -> StartSpec:
    """What the round after `head` starts from."""
    return StartSpec(
        round=RoundNumber(head.round),
        global_step=head.global_step,
        parts=head.parts,
        shards=tuple(tuple((share.blob, share.tokens) for share in row.blobs) for row in head.state.shards),
        merge_alpha=head.merge_alpha,
        merge_lists=merge_lists,
        receivers=head.receivers() if head.merge_alpha else (),
    )


def accepted_base(before: Head, after: Head, peer: PeerId) -> int | None:
    """Base round of the update of `peer` that became the newest accepted one between two heads."""
    old, new = before.state.row(peer), after.state.row(peer)
    if new is None or new.base_round == 0 or (old is not None and old.base_round == new.base_round):
        return None
    return new.base_round


def settle(
    before: Head | None, after: Head, certificate: Certificate | None, peer: PeerId, published: dict[int, set[Digest]]
) -> Settlement:
    """Rules for masters and residual after `after`.

    `before`: the head whose start the trainer has loaded; None: none. `published`: expert blobs of this peer's own
    updates, by base round.
    """
    owned = after.state.shards_of(peer)
    if before is None or certificate is None:
        return Settlement(owned=owned, masters={}, residual="keep", accepted_update=None, kept_parts=())
    base = accepted_base(before, after, peer)
    mine = published.get(base, set()) if base is not None else set()
    next_after = before.round + 1 == after.round
    had = set(before.state.shards_of(peer))
    masters: dict[int, MasterRule] = {}
    for shard in owned:
        row, single = after.state.shards[shard], len(after.state.leases[shard].owners) == 1
        if shard not in had:
            continue
        if base is not None:
            if single and any(share.blob in mine for share in row.blobs):
                masters[shard] = "carry"
        elif next_after and row == before.state.shards[shard] and not _has_update(before, certificate, peer):
            masters[shard] = "keep"
    kept = bits(certificate.body.kept, len(certificate.body.parts))
    return Settlement(
        owned=owned,
        masters=masters,
        residual="keep" if base is None else "advance",
        accepted_update=base,
        kept_parts=tuple(sorted(kept)),
    )


def _has_update(before: Head, certificate: Certificate, peer: PeerId) -> bool:
    """Whether an update of the peer is in the cut at all, accepted or refused."""
    places = [place for place, member in enumerate(before.state.members) if member == peer]
    return any(entry.kind is ItemKind.UPDATE and entry.who in places for entry in certificate.body.entries)
