"""The chain as it lies in a node's ledger: followed from genesis, over gaps, or from the nearest tables that were kept.

Nothing is verified here but that it fits together: what is in the ledger was verified before it was stored. `audit`
verifies it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spes_p2p.errors import LocalStateError, RemoteProtocolError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.protocol.body import Body, Certificate
from spes_p2p.protocol.codec import body_hash, decode_certificate, encode
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.questions import Tables, Waypoint, decode_answer, decode_state
from spes_p2p.protocol.skip import head_at, head_from_tables
from spes_p2p.storage.ledger import Gap, Ledger, LedgerEntry

LAST_ROUND = RoundNumber(2**62)
TABLES_EVERY = 16
"""Certificates whose tables are kept: one in so many."""
_MAX_FOLLOWED = 4 * TABLES_EVERY
"""To answer a question, no more certificates than this are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One certificate that extends the one before it."""

    before: Head
    certificate: Certificate
    after: Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """The certificate on the far side of a gap."""

    gap: Gap
    certificate: Certificate
    after: Head


def entry_of(certificate: Certificate, encoded: bytes | None = None) -> LedgerEntry:
    """A certificate as the ledger keeps it."""
    body = certificate.body
    return LedgerEntry(
        epoch=body.epoch,
        round=RoundNumber(body.round),
        hash=body_hash(body),
        body=encode(body),
        certificate=encode(certificate) if encoded is None else encoded,
        attachments=certificate.merge_lists,
        final=body.final,
    )


def tables_of(head: Head, *, always: bool = False) -> bytes:
    """The tables of a state as the ledger keeps them; empty if those of this round are not kept."""
    return encode(Tables(head.state)) if always or head.round % TABLES_EVERY == 0 else b""


def decode_waypoint(data: bytes) -> Waypoint:
    """A waypoint as the ledger keeps it. Raises RemoteProtocolError if it is damaged."""
    waypoint = decode_answer(data)
    if not isinstance(waypoint, Waypoint):
        raise RemoteProtocolError(None, "malformed waypoint")
    return waypoint


def walk(ledger: Ledger, start: Head) -> Iterator[Step | Jump]:
    """Every final certificate after `start`, which is genesis or a head of this chain.

    Raises LocalStateError, with the round, if the ledger's certificates are not a chain that extends it.
    """
    head, gaps = start, {gap.from_round: gap for gap in ledger.gaps()}
    for entry in ledger.range(RoundNumber(head.round + 1), LAST_ROUND):
        try:
            certificate = decode_certificate(entry.certificate)
            gap = gaps.get(RoundNumber(head.round))
            if gap is not None and gap.to_round == entry.round:
                after = _far_side(ledger, head, gap)
                yield Jump(gap=gap, certificate=certificate, after=after)
            else:
                after = next_head(head, certificate.body)
                yield Step(before=head, certificate=certificate, after=after)
        except RemoteProtocolError as error:
            raise LocalStateError(f"the ledger does not fit its run at round {entry.round}: {error.reason}") from error
        head = after


def _far_side(ledger: Ledger, head: Head, gap: Gap) -> Head:
    kept = ledger.tables_before(gap.to_round)
    waypoint = decode_waypoint(gap.waypoints[-1])
    if kept is None or kept[0] != body_hash(waypoint.certificate.body):
        raise RemoteProtocolError(None, "the tables on the far side of the gap before it are missing")
    return head_at(head.run, waypoint, decode_state(kept[1]))


class StoredChain:
    """Heads of a ledger, by round."""

    def __init__(self, ledger: Ledger, genesis: Head) -> None:
        self._ledger = ledger
        self._genesis = genesis

    def nearest(self, number: int) -> Head:
        """The newest head up to a round whose tables were kept; genesis if there is none. Raises LocalStateError."""
        kept = self._ledger.tables_before(number)
        entry = self._ledger.by_hash(kept[0]) if kept is not None else None
        if kept is None or entry is None:
            return self._genesis
        try:
            body = decode_certificate(entry.certificate).body
            if body.run != self._genesis.run.run_id:
                raise RemoteProtocolError(None, "it is of another run")
            return head_from_tables(self._genesis.run, body, decode_state(kept[1]), self._recent(body))
        except RemoteProtocolError as error:
            raise LocalStateError(f"the ledger does not fit its run at round {entry.round}: {error.reason}") from error

    def head(self, number: int) -> Head | None:
        """The head after the certificate of a round; None if it is not here, or cannot be told at little cost."""
        head = self.nearest(number)
        if number - head.round > _MAX_FOLLOWED:
            return None
        for entry in self._ledger.range(RoundNumber(head.round + 1), RoundNumber(number)):
            if entry.round != head.round + 1:
                return None
            head = next_head(head, decode_certificate(entry.certificate).body)
        return head if head.round == number else None

    def _recent(self, body: Body) -> tuple[tuple[int, Digest], ...]:
        """(round, hash) of the two certificates before a body."""
        before = self._body_before(body)
        older = ((before.round - 1, before.prev),) if before is not None else ()
        return (*older, (body.round - 1, body.prev))

    def _body_before(self, body: Body) -> Body | None:
        entry = self._ledger.by_hash(body.prev)
        if entry is not None:
            return decode_certificate(entry.certificate).body
        for gap in self._ledger.gaps():
            if gap.to_round == body.round:
                return decode_waypoint(gap.waypoints[-1]).before
        return None
