"""What the checks of a simulated swarm know of the protocol, in one place: finality, heights, slots, growth, room."""

from __future__ import annotations

from collections.abc import Iterator

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import Body, CutItem
from spes_p2p.protocol.evidence import exclusive_slot
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import (
    CutMessage,
    Message,
    ProposalMessage,
    Signed,
)
from spes_p2p.protocol.params import MIN_BYZANTINE_VOTERS
from spes_p2p.protocol.roster import qualified
from spes_p2p.protocol.wire import ItemKind

Slot = tuple[object, ...]


def is_final(head: Head) -> bool:
    """Whether a head is a final certificate's."""
    return head.is_final


def final_slot(before: Head, head: Head) -> tuple[int, int]:
    """(epoch, height): one final body for each."""
    return head.epoch, before.height


def signed_in(message: Message) -> tuple[Signed, ...]:
    """What a peer vouches for with its own signature in a message."""
    match message:
        case Signed():
            return (message,)
        case CutMessage():
            return (message.announcement,)
        case ProposalMessage():
            return (message.proposal,)
        case _:
            return ()


def promise_slot(signed: Signed) -> Slot | None:
    """The slot for which an honest peer signs one value only: more than evidence covers. None: may be repeated."""
    return exclusive_slot(signed)


def most_new_voters(before: Terms, head: Head) -> int:
    """By how many the voters may grow; invited runs fill up to 4 at once, also after some have gone."""
    growth = max(1, len(before.voters) // 4)
    if before.config.protocol.admission != "open":
        growth = max(growth, MIN_BYZANTINE_VOTERS - len(set(before.voters) & set(head.state.members)))
    return growth


def most_shards(terms: Terms, peer: PeerId) -> int:
    """Shards that a member of the roster of `terms` may hold."""
    row = terms.head.state.row(peer)
    if row is None:
        return 0
    return row.capacity if qualified(terms, row) else min(row.capacity, 1)


def has_room(terms: Terms, peer: PeerId) -> bool:
    """Whether a member may hold one more shard."""
    return len(terms.head.state.shards_of(peer)) < most_shards(terms, peer)


def authors(before: Head, body: Body, kind: ItemKind) -> Iterator[tuple[PeerId, Digest]]:
    """(author, statement) of the entries of one kind in a body."""
    peers = (*before.state.members, *body.newcomers)
    for entry in body.entries:
        if entry.kind is kind:
            yield peers[entry.who], entry.statement


def updates_in(items: tuple[CutItem, ...]) -> set[tuple[PeerId, Digest]]:
    """(author, manifest) of the updates of a cut."""
    return {(item.peer, item.statement) for item in items if item.kind is ItemKind.UPDATE}
