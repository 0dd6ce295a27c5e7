"""What certificates mean for this peer's own weights: docs/protocol.md, section 7. Pure.

A trainer may be several certificates behind: what each of them did to the peer's work is gathered (`Since`) and applied
at the next load.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import bits
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import ItemKind, RefusalReason
from spes_p2p.training.own_work import MasterRule, ResidualRule
from spes_p2p.training.start import StartSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How the trainer goes from one round to the next."""

    owned: tuple[int, ...]
    masters: dict[int, MasterRule]
    residual: ResidualRule
    accepted_update: int | None
    """Base round of this peer's newest update that was accepted."""
    kept_parts: tuple[int, ...]
    """Parts that the certificate which accepted it kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What happened to one peer's work since the head whose start its trainer has loaded."""

    before: Head
    owned: frozenset[int]
    """Shards owned then and after every certificate since."""
    accepted_update: int | None = None
    """Base round of the newest update that was accepted meanwhile."""
    kept_parts: tuple[int, ...] = ()
    """Parts kept by the certificate that accepted it."""
    named: bool = False
    """An update of the peer was in some cut, accepted or refused."""
    lost: bool = False
    """The branch that the trainer's start was on has been left: what the trainer has of its own stands for nothing."""


def since(head: Head, peer: PeerId) -> Since:
    """Nothing has happened yet."""
    return Since(before=head, owned=frozenset(head.state.shards_of(peer)))


def branch_lost(head: Head) -> Since:
    """The branch of the trainer's start has been left; `head` is where both begin, or any later one."""
    return Since(before=head, owned=frozenset(), lost=True)


def then(so_far: Since, before: Head, after: Head, body: Body, peer: PeerId) -> Since:
    """One certificate more: `body` leads from `before` to `after`."""
    base = accepted_base(before, after, peer)
    so_far = dataclasses.replace(
        so_far,
        owned=so_far.owned & frozenset(after.state.shards_of(peer)),
        named=so_far.named or bool(own_updates(before, body, peer)),
    )
    if base is None:
        return so_far
    kept = tuple(sorted(bits(body.kept, len(body.parts))))
    return dataclasses.replace(so_far, accepted_update=base, kept_parts=kept)


def settle(so_far: Since | None, after: Head, peer: PeerId, published: dict[int, set[Digest]]) -> Settlement:
    """Rules for masters and residual at the start of the round after `after`.

    `so_far`: None if the trainer has no start. `published`: expert blobs of this peer's own updates, by base round.
    """
    owned = after.state.shards_of(peer)
    if so_far is None:
        return Settlement(owned=owned, masters={}, residual="keep", accepted_update=None, kept_parts=())
    if so_far.lost:
        return Settlement(owned=owned, masters={}, residual="zero", accepted_update=None, kept_parts=())
    base = so_far.accepted_update
    mine = published.get(base, set()) if base is not None else set()
    masters: dict[int, MasterRule] = {}
    for shard in owned:
        row, num_owners = after.state.shards[shard], len(after.state.leases[shard].owners)
        if shard not in so_far.owned:
            continue
        if base is not None:
            if num_owners == 1 and any(share.blob in mine for share in row.blobs):
                masters[shard] = "carry"
        elif row == so_far.before.state.shards[shard] and not so_far.named:
            masters[shard] = "keep"
    return Settlement(
        owned=owned,
        masters=masters,
        residual="keep" if base is None else "advance",
        accepted_update=base,
        kept_parts=so_far.kept_parts,
    )


def start_spec(head: Head, merge_lists: bytes) -> StartSpec:
    """What the round after `head` starts from."""
    return StartSpec(
        round=RoundNumber(head.round),
        base=head.hash,
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


def own_updates(before: Head, body: Body, peer: PeerId) -> dict[int, RefusalReason | None]:
    """Updates of a peer in the cut behind `body`: place of the entry -> why it, or a part of it, was refused."""
    places = {place for place, member in enumerate(before.state.members) if member == peer}
    reasons = {remark.entry: remark.reason for remark in body.refused}
    return {
        number: reasons.get(number)
        for number, entry in enumerate(body.entries)
        if entry.kind is ItemKind.UPDATE and entry.who in places
    }
