"""Tentative certificates in a ledger: which of them are on the chain, and where a node begins after a restart."""

from __future__ import annotations

import pytest

from spes_p2p.errors import LocalProtocolError, LocalStateError
from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.resume import Checkpoint, resume
from spes_p2p.node.stored import (
    TIP_META,
    StoredCertificates,
    StoredChain,
    certificates_between,
    entry_of,
    tables_of,
    walk,
    walk_to_tip,
)
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.questions import CertificatesQuestion, Waypoint, WaypointQuestion, decode_answer
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = sorted(cases.identities(3), key=lambda peer: peer.peer_id)
ME = FOUNDERS[0].peer_id
GENESIS = cases.genesis_of(FOUNDERS)
Made = tuple[Certificate, Head]


def certify(head: Head, side: tuple[int, ...] = ()) -> Made:
    """A round of signs of life; `side`: places of those that make it tentatively."""
    return cases.round_of(head, [FOUNDERS[place] for place in side or (0, 1, 2)], tentative=bool(side))


FIRST = certify(GENESIS)
A = [certify(FIRST[1], (0, 1))]
A.append(certify(A[0][1], (0, 1)))
B = [certify(FIRST[1], (1, 2))]
NEXT = certify(A[1][1])
LAST = [certify(NEXT[1])]
LAST.append(certify(LAST[0][1]))
CHAIN = [FIRST, *A, NEXT, *LAST]


def put(ledger: Ledger, made: Made) -> None:
    """As the driver does it."""
    certificate, head = made
    ledger.append(entry_of(certificate), meta={TIP_META: bytes(head.hash)}, tables=tables_of(head))


def at(head: Head) -> Checkpoint:
    return Checkpoint(round=head.round + 1, base=head.hash)


def begin(ledger: Ledger, checkpoint: Checkpoint | None = None) -> tuple[Head, object]:
    place = resume(ledger, GENESIS, checkpoint, PeerId(ME))
    assert place.head.is_final
    place.to_tip(ledger)
    newest = place.newest()
    return newest.head, newest.since


def test_a_restart_is_at_the_tip_that_was_stored_last_whatever_else_is_there(ledger: Ledger) -> None:
    put(ledger, FIRST)
    assert begin(ledger) == (FIRST[1], None)
    for made in (*A, *B):
        put(ledger, made)
        assert begin(ledger) == (made[1], None)
    assert begin(ledger)[0].base == FIRST[1]
    ledger.set_meta(TIP_META, bytes(A[1][1].hash))
    assert begin(ledger)[0].branch == (A[0][1], A[1][1])
    ledger.set_meta(TIP_META, bytes(FIRST[1].hash))
    assert begin(ledger)[0] == FIRST[1]


def test_certificate_and_tip_are_stored_together_or_not_at_all(ledger: Ledger) -> None:
    """S11: whatever write a crash comes before, the state is the one before the certificate, or the one after it."""
    put(ledger, FIRST)
    put(ledger, A[0])
    other = entry_of(LAST[0][0])
    ledger.append(other)
    twin = type(other)(
        epoch=other.epoch, round=other.round, hash=Digest(bytes(32)), body=b"", certificate=b"", attachments=b"",
        final=True,
    )  # fmt: skip
    with pytest.raises(LocalProtocolError):
        ledger.append(twin, meta={TIP_META: bytes(32)})
    assert ledger.get_meta(TIP_META) == A[0][1].hash


def test_the_branch_behind_a_final_certificate_is_on_the_chain_and_others_are_not(ledger: Ledger) -> None:
    for made in (FIRST, *B, *A, NEXT, *LAST):
        put(ledger, made)
    assert [step.after for step in walk(ledger, GENESIS)] == [head for _, head in CHAIN]
    assert [step.after.is_final for step in walk(ledger, GENESIS)] == [True, False, False, True, True, True]
    assert list(walk_to_tip(ledger, LAST[1][1])) == []
    stored, chain = StoredChain(ledger, GENESIS), StoredCertificates(ledger)
    for number, (certificate, head) in enumerate(CHAIN, start=1):
        assert stored.head(number) == head
        entry = chain.entry(RoundNumber(number))
        assert entry is not None and entry.certificate == encode(certificate)
    assert chain.entry(RoundNumber(7)) is None
    frames = [entry.certificate for entry in certificates_between(ledger, 2, 5)]
    assert frames == [encode(certificate) for certificate, _ in CHAIN[1:5]]


def test_a_tip_that_was_left_long_ago_says_nothing(ledger: Ledger) -> None:
    for made in (FIRST, *A, NEXT):
        put(ledger, made)
    ledger.set_meta(TIP_META, bytes(A[0][1].hash))
    assert begin(ledger)[0] == NEXT[1]
    ledger.set_meta(TIP_META, bytes(32))
    assert begin(ledger)[0] == NEXT[1]


def test_a_missing_tentative_certificate_behind_a_final_one_is_named(ledger: Ledger) -> None:
    for made in (FIRST, A[1], NEXT):
        put(ledger, made)
    with pytest.raises(LocalStateError, match=r"at round 3: .* does not extend round 1"):
        list(walk(ledger, GENESIS))


def test_work_of_a_branch_that_was_left_is_void_after_the_restart_too(ledger: Ledger) -> None:
    for made in (FIRST, *A):
        put(ledger, made)
    _, since = begin(ledger, at(A[1][1]))
    assert since is not None and not since.lost and since.before == A[1][1]
    put(ledger, B[0])
    _, since = begin(ledger, at(A[1][1]))
    assert since is not None and since.lost
    # of the same round, on the other branch
    _, since = begin(ledger, at(A[0][1]))
    assert since is not None and since.lost
    _, since = begin(ledger, at(FIRST[1]))
    assert since is not None and not since.lost and since.before == FIRST[1]


def test_a_head_from_tables_knows_that_others_may_not_know_better_than_to_build_on_another_branch(
    ledger: Ledger,
) -> None:
    for certificate, head in CHAIN:
        ledger.append(entry_of(certificate), tables=tables_of(head, always=head.is_final))
    stored = StoredChain(ledger, GENESIS)
    for certificate, head in CHAIN:
        if certificate.body.final:
            found = stored.nearest(head.round)
            assert (found, found.forked) == (head, head.forked)
    assert NEXT[1].forked == LATE_ROUNDS + 1


async def test_questions_are_answered_with_tentative_certificates_where_final_ones_are_built_on_them(
    ledger: Ledger,
) -> None:
    for made in (FIRST, *B, *A, NEXT, *LAST):
        put(ledger, made)
    source = ChainSource(ledger, GENESIS)
    asker = PeerId(FOUNDERS[1].peer_id)
    frames = await source.answer(asker, encode(CertificatesQuestion(1, 64)))
    assert [decode_certificate(frame) for frame in frames] == [certificate for certificate, _ in CHAIN]
    (frame,) = await source.answer(asker, encode(WaypointQuestion(4)))
    waypoint = decode_answer(frame)
    assert isinstance(waypoint, Waypoint)
    assert (waypoint.certificate, waypoint.before) == (NEXT[0], FIRST[0].body)
    assert await source.answer(asker, encode(WaypointQuestion(3))) == []
