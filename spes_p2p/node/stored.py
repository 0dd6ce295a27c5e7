"""The chain as it lies in a node's ledger: followed from genesis, over gaps, or from the nearest tables that were kept.

Tentative certificates are on the chain if the next final one was built on them (its `via`), or, after the last final
one, if they lead to the tip that the node was on. Others, of branches that were left, are in the ledger too and stay
out of everything here.

Nothing is verified here but that it fits together: what is in the ledger was verified before it was stored. `audit`
verifies it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from spes_p2p.errors import LocalStateError, RemoteProtocolError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.protocol.body import Body, Certificate, base_of
from spes_p2p.protocol.codec import body_hash, decode_certificate, encode
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.questions import Tables, Waypoint, decode_answer, decode_state
from spes_p2p.protocol.skip import head_at, head_from_tables
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.storage.ledger import Gap, Ledger, LedgerEntry

LAST_ROUND = RoundNumber(2**62)
TABLES_EVERY = 16
"""Final certificates whose tables are kept: one in so many."""
TIP_META = "tip"
"""The ledger's entry with the hash of the tip, written together with its certificate."""
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
    kept = head.is_final and head.round % TABLES_EVERY == 0
    return encode(Tables(head.state)) if always or kept else b""


def decode_waypoint(data: bytes) -> Waypoint:
    """A waypoint as the ledger keeps it. Raises RemoteProtocolError if it is damaged."""
    waypoint = decode_answer(data)
    if not isinstance(waypoint, Waypoint):
        raise RemoteProtocolError(None, "malformed waypoint")
    return waypoint


def behind(ledger: Ledger, via: Digest, trunk: Digest) -> list[LedgerEntry]:
    """The tentative certificates from the one after the final certificate `trunk` to `via`, as far as they are here:
    if one is missing, those after it. Empty for NO_DIGEST. Raises RemoteProtocolError if one is damaged."""
    found: list[LedgerEntry] = []
    identity = via
    while identity not in (NO_DIGEST, trunk):
        entry = ledger.by_hash(identity)
        if entry is None or entry.final:
            break
        found.append(entry)
        identity = Digest(decode_certificate(entry.certificate).body.prev)
    return found[::-1]


def tip_branch(ledger: Ledger, final: Digest) -> list[LedgerEntry]:
    """The tentative certificates from the last final one to the tip; none if it was on no branch of that. Raises
    RemoteProtocolError if one is damaged."""
    branch = behind(ledger, Digest(ledger.get_meta(TIP_META) or NO_DIGEST), final)
    starts_here = bool(branch) and decode_certificate(branch[0].certificate).body.prev == final
    return branch if starts_here else []


def walk(ledger: Ledger, start: Head) -> Iterator[Step | Jump]:
    """Every certificate after `start` up to the last final one; `start` is genesis or a final head of this chain.

    Raises LocalStateError, with the round, if the ledger's certificates are not a chain that extends it.
    """
    head, gaps = start, {gap.from_round: gap for gap in ledger.gaps()}
    for entry in ledger.range(RoundNumber(head.round + 1), LAST_ROUND):
        gap = gaps.get(RoundNumber(head.round))
        with _fits(entry.round):
            certificate = decode_certificate(entry.certificate)
            if gap is not None and gap.to_round == entry.round:
                head = _far_side(ledger, head, gap)
                yield Jump(gap=gap, certificate=certificate, after=head)
                continue
            branch = behind(ledger, certificate.body.via, head.hash)
        for step in _steps(head, [*branch, entry]):
            head = step.after
            yield step


def walk_to_tip(ledger: Ledger, final: Head) -> Iterator[Step]:
    """The tentative certificates from the last final one to the tip that this node was on; none if it was on no branch
    of it. Raises LocalStateError if they do not fit."""
    with _fits(final.round + 1):
        branch = tip_branch(ledger, final.hash)
    yield from _steps(final, branch)


def certificates_between(ledger: Ledger, first: int, last: int) -> Iterator[LedgerEntry]:
    """The certificates of these rounds, as far as a final one is built on them, in order; ends before one that is not
    here. Raises RemoteProtocolError if one is damaged."""
    number = first
    for entry in ledger.range(RoundNumber(first), LAST_ROUND):
        branch: list[LedgerEntry] = []
        if entry.round != number:
            body = decode_certificate(entry.certificate).body
            branch = behind(ledger, body.via, Digest(body.prev))
        for one in (*branch, entry):
            if one.round > last or one.round > number:
                return
            if one.round == number:
                yield one
                number += 1


class StoredCertificates:
    """Certificates of the chain up to the last final one, by round."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._final: Digest | None = None
        self._behind: dict[int, Digest] = {}
        """Tentative ones behind the final one `_final`: whoever asks for one of them asks for the next ones too."""

    def entry(self, number: RoundNumber) -> LedgerEntry | None:
        """The certificate of a round; None if it is not here. Raises RemoteProtocolError if one is damaged."""
        final = self._ledger.by_round(number) or next(self._ledger.range(number, LAST_ROUND), None)
        if final is None or final.round == number:
            return final
        if final.hash != self._final:
            body = decode_certificate(final.certificate).body
            self._behind = {entry.round: entry.hash for entry in behind(self._ledger, body.via, Digest(body.prev))}
            self._final = final.hash
        identity = self._behind.get(number)
        return None if identity is None else self._ledger.by_hash(identity)


def _steps(head: Head, entries: list[LedgerEntry]) -> Iterator[Step]:
    for entry in entries:
        with _fits(entry.round):
            certificate = decode_certificate(entry.certificate)
            after = next_head(head, certificate.body)
        yield Step(before=head, certificate=certificate, after=after)
        head = after


@contextmanager
def _fits(number: int) -> Iterator[None]:
    try:
        yield
    except RemoteProtocolError as error:
        raise LocalStateError(f"the ledger does not fit its run at round {number}: {error.reason}") from error


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
            head = head_from_tables(self._genesis.run, body, decode_state(kept[1]), self._recent(body))
            return replace(head, forked=self._forked(body))
        except RemoteProtocolError as error:
            raise LocalStateError(f"the ledger does not fit its run at round {entry.round}: {error.reason}") from error

    def head(self, number: int) -> Head | None:
        """The head after the certificate of a round; None if it is not here, or cannot be told at little cost."""
        head = self.nearest(number)
        if number - head.round > _MAX_FOLLOWED:
            return None
        for entry in certificates_between(self._ledger, head.round + 1, number):
            head = next_head(head, decode_certificate(entry.certificate).body)
        return head if head.round == number else None

    def _recent(self, body: Body) -> tuple[tuple[int, Digest], ...]:
        """(round, hash) of the two certificates before a body."""
        before = self._body_before(body, base_of(body))
        older = ((before.round - 1, base_of(before)),) if before is not None else ()
        return (*older, (body.round - 1, base_of(body)))

    def _forked(self, body: Body) -> int:
        """`Head.forked` after a final body."""
        for left in range(LATE_ROUNDS + 1, 0, -1):
            if body.via != NO_DIGEST:
                return left
            before = self._body_before(body, Digest(body.prev))
            if before is None:
                return 0
            body = before
        return 0

    def _body_before(self, body: Body, identity: Digest) -> Body | None:
        entry = self._ledger.by_hash(identity)
        if entry is not None:
            return decode_certificate(entry.certificate).body
        for gap in self._ledger.gaps():
            if gap.to_round == body.round and identity == body.prev:
                return decode_waypoint(gap.waypoints[-1]).before
        return None
