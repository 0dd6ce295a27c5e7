"""Proof that a peer signed two different statements for one slot.

Slots: one update per round and certificate that it builds on; one cut and one proposal per view (as its leader); one
vote per view and step; one view change per view; one digest per part and set of updates. A tentative attempt has views
of its own: its votes never count in a final quorum.
"""

from __future__ import annotations

from typing import TypeAlias

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.codec import check_signature, decode_signed
from spes_p2p.protocol.messages import (
    CutAnnouncement,
    Evidence,
    Manifest,
    PartDigest,
    Proposal,
    Signed,
    ViewChange,
    Vote,
)

ExclusiveSlot: TypeAlias = tuple[str, int, int, int, int, bytes]
"""(tag, epoch, round, view or part, step, bytes); what does not apply is 0. Bytes: the certificate that an update
builds on, the branch of a ballot, or the hash of the updates of a part."""


def exclusive_slot(signed: Signed) -> ExclusiveSlot | None:
    """The slot that a peer may fill once only; None for statements that may be repeated."""
    body = signed.body
    match body:
        case Manifest():
            return body.tag, body.epoch, body.round, 0, 0, body.prev
        case CutAnnouncement() | Proposal() | ViewChange():
            return body.tag, body.epoch, body.round, body.view, 0, body.branch
        case Vote():
            return body.tag, body.epoch, body.round, body.view, body.step, body.branch
        case PartDigest():
            return body.tag, body.epoch, body.round, body.part, 0, body.updates
        case _:
            return None


def conflicting(first: Signed, second: Signed) -> bool:
    """Whether two statements of one peer fill one exclusive slot differently."""
    slot = exclusive_slot(first)
    return (
        first.peer == second.peer and slot is not None and slot == exclusive_slot(second) and first.body != second.body
    )


def named(evidence: Evidence) -> PeerId:
    """The peer that evidence is about, proven or not. Raises RemoteProtocolError if it is malformed."""
    return decode_signed(evidence.first).peer


def accused(evidence: Evidence, verifier: Verifier) -> PeerId:
    """The proven equivocator. Raises RemoteProtocolError if the evidence proves nothing."""
    first, second = decode_signed(evidence.first), decode_signed(evidence.second)
    check_signature(first, verifier)
    check_signature(second, verifier)
    runs = {signed.body.run for signed in (first, second)}
    if runs != {evidence.run} or not conflicting(first, second):
        raise RemoteProtocolError(None, "the evidence proves nothing")
    return first.peer
