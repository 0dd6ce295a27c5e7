"""What a peer may ask about the chain besides taking part in a round, and the answers.

A question goes to one peer, which answers it from its ledger, or not at all (docs/protocol.md, section 8). All answers
are checked against what the asker trusts already; nobody is believed.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Body, Certificate
from spes_p2p.protocol.codec import decode_canonical
from spes_p2p.protocol.state import RosterRow, State
from spes_p2p.protocol.wire import Count, Hash, Wire

MAX_QUESTION_BYTES = 128
MAX_CERTIFICATES = 64
"""In one answer."""


class TipQuestion(Wire, frozen=True, tag="tip?"):
    """Which certificate is your newest final one? Answered with a `Tip`."""


class CertificatesQuestion(Wire, frozen=True, tag="certificates?"):
    """The final certificates from round `first` on, `count` of them, or as many as one answer holds."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=MAX_CERTIFICATES)]


class WaypointQuestion(Wire, frozen=True, tag="waypoint?"):
    """What is needed to skip to the certificate of a round. Answered with a `Waypoint`."""

    round: Count


class TablesQuestion(Wire, frozen=True, tag="tables?"):
    """The tables of the state after the certificate of a round. Answered with a `Tables`."""

    round: Count


class Tip(Wire, frozen=True, tag="tip!"):
    """A peer's newest final certificate; round 0: it has none but the run manifest."""

    epoch: Count
    round: Count
    hash: Hash
    first: Count
    """It has all certificates from this round on."""


class Waypoint(Wire, frozen=True, tag="waypoint!"):
    """A certificate, and what shows who its voters are."""

    certificate: Certificate
    before: Body
    """Body of the certificate before it, which names the root of `roster`."""
    roster: Annotated[tuple[RosterRow, ...], Meta(max_length=4096)]
    """The roster after `before`."""


class Tables(Wire, frozen=True, tag="tables!"):
    """The tables of a state."""

    state: State


Question: TypeAlias = TipQuestion | CertificatesQuestion | WaypointQuestion | TablesQuestion
Answer: TypeAlias = Tip | Waypoint | Tables


_question_decoder = msgspec.msgpack.Decoder(Question)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def decode_question(data: bytes, sender: PeerId | None = None) -> Question:
    """Question of canonical bytes. Raises RemoteProtocolError for anything else."""
    return decode_canonical(_question_decoder, data, sender, MAX_QUESTION_BYTES)


def decode_answer(data: bytes, sender: PeerId | None = None) -> Answer:
    """Answer of canonical bytes. Raises RemoteProtocolError for anything else."""
    return decode_canonical(_answer_decoder, data, sender)


def decode_state(data: bytes) -> State:
    """Tables as they lie on disk. Raises RemoteProtocolError if they are damaged."""
    answer = decode_answer(data)
    if not isinstance(answer, Tables):
        raise RemoteProtocolError(None, "malformed tables")
    return answer.state
