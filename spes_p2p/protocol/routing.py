"""Where a message belongs: to the open round and its ballot, to another ballot, or to another round. Pure.

Statements, acks, cuts and the like belong to a round. Votes and what goes with them belong to a ballot: the final one
has the height as its number, over all tentative rounds of the height; that of a tentative attempt has its round.
"""

from __future__ import annotations

from enum import Enum, auto

from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.inbox import round_of
from spes_p2p.protocol.messages import (
    BodyMessage,
    CutAnnouncement,
    CutMessage,
    Decided,
    HalfIn,
    Manifest,
    Message,
    Offer,
    Proposal,
    ProposalMessage,
    Receipt,
    Seen,
    Signed,
    ViewChange,
    Vote,
    Want,
)


class Place(Enum):
    """What to do with a message."""

    NOWHERE = auto()
    """It belongs to no round."""
    NOW = auto()
    """To the open round, and to the ballot that is open if it is part of one."""
    OTHER_BALLOT = auto()
    """To another ballot of this round or height: this peer may yet take part in it."""
    LATER = auto()
    LATE = auto()
    UNKNOWN_CHAIN = auto()
    """Its sender has a certificate that this peer lacks, or builds on another branch: ask it."""
    PAST_EPOCH = auto()


def ballot_of(message: Message) -> tuple[int, bytes] | None:
    """(round, branch) of the ballot that a message belongs to; None for those that belong to a round as a whole."""
    match message:
        case Seen():
            return message.round, message.branch
        case Signed(body=Vote() | ViewChange() as body):
            return body.round, body.branch
        case CutMessage(announcement=Signed(body=CutAnnouncement() as body)):
            return body.round, body.branch
        case ProposalMessage(proposal=Signed(body=Proposal() as body)):
            return body.round, body.branch
        case _:
            return None


def branch_of(message: Message) -> bytes | None:
    """The branch of a ballot that a message is to be kept for; None for a question, which is asked again."""
    ballot = ballot_of(message)
    return None if ballot is None or isinstance(message, Seen) else ballot[1]


def epoch_of(message: Message) -> int | None:
    """The epoch that a message belongs to; None for those that belong to none."""
    match message:
        case Signed():
            return message.body.epoch
        case Receipt():
            return None
        case CutMessage():
            return message.cut.epoch
        case ProposalMessage() | BodyMessage():
            return message.body.epoch
        case Offer() | Want() | Cut() | Decided() | HalfIn() | Seen():
            return message.epoch
        case _:
            return None


def place_of(message: Message, terms: Terms) -> tuple[Place, int]:
    """Where a message belongs, and its number: a round, or a height."""
    ballot, epoch = ballot_of(message), epoch_of(message)
    number = round_of(message) if ballot is None else ballot[0]
    if number < 0:
        return Place.NOWHERE, number
    if epoch is not None and epoch != terms.head.epoch:
        return Place.UNKNOWN_CHAIN if epoch > terms.head.epoch else Place.PAST_EPOCH, number
    if ballot is not None:
        return _place_in_ballots(ballot, terms), number
    if number > terms.round:
        return Place.LATER, number
    if _on_another_branch(message, terms):
        return Place.UNKNOWN_CHAIN, number
    return Place.LATE if number < terms.round else Place.NOW, number


def _place_in_ballots(ballot: tuple[int, bytes], terms: Terms) -> Place:
    number, branch = ballot
    if ballot == (terms.ballot_round, terms.branch):
        return Place.NOW
    if number == (terms.round if branch else terms.height):
        return Place.OTHER_BALLOT
    if number > terms.round:
        return Place.LATER
    if not branch and number > terms.height:
        return Place.UNKNOWN_CHAIN  # its sender has a final certificate in between
    return Place.LATE


def _on_another_branch(message: Message, terms: Terms) -> bool:
    """Whether a message is an update on another branch, as an honest peer may make where there were several lately."""
    if not terms.head.forked or not isinstance(message, Signed) or not isinstance(message.body, Manifest):
        return False
    if message.body.run != terms.head.run.run_id:
        return False
    known = dict(terms.head.recent).get(message.body.round - 1)
    return known is not None and known != message.body.prev
