"""Simple Byzantine peers: they show one value to one half of the others and another to the rest."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import cut_hash, decode, encode, sign
from spes_p2p.protocol.messages import CutAnnouncement, CutMessage, Manifest, ProposalMessage, Signed, Vote
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind


def equivocator(me: Signer, other_half: frozenset[PeerId]) -> Callable[[fx.Send], bytes | None]:
    """For `SimPeer.tampers`: another vote, cut or update for one half of the receivers, and no proposal."""

    def tampered(send: fx.Send) -> bytes | None:
        if send.to not in other_half:
            return send.data
        message = decode(send.data)
        match message:
            case Signed(peer=peer, body=Vote()) if peer == me.peer_id:
                return encode(_other_vote(me, message))
            case Signed(peer=peer, body=Manifest() as manifest) if peer == me.peer_id:
                return encode(sign(me, structs.replace(manifest, tokens=manifest.tokens + 1)))
            case CutMessage() if message.announcement.peer == me.peer_id:
                return encode(_other_cut(me, message))
            case ProposalMessage() if message.proposal.peer == me.peer_id:
                return None
            case _:
                return send.data

    return tampered


def _other_vote(me: Signer, signed: Signed) -> Signed:
    """Nil where it voted for a body; a body that nobody knows where it voted nil."""
    body = signed.body
    if not isinstance(body, Vote):
        return signed
    other = NO_DIGEST if body.body != NO_DIGEST else body.run
    return sign(me, structs.replace(body, body=other, held=False))


def _other_cut(me: Signer, message: CutMessage) -> CutMessage:
    """The cut without somebody's update."""
    announcement = message.announcement.body
    victims = [item for item in message.cut.items if item.kind is ItemKind.UPDATE and item.peer != me.peer_id]
    if not victims or not isinstance(announcement, CutAnnouncement):
        return message
    items = tuple(item for item in message.cut.items if item != victims[0])
    cut = structs.replace(message.cut, items=items)
    return CutMessage(sign(me, structs.replace(announcement, cut=cut_hash(cut))), cut)
