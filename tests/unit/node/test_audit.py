"""`ledger verify`'s findings: what is right is counted, what is wrong is named by its round."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from spes_p2p.errors import UsageError
from spes_p2p.ids import RoundNumber
from spes_p2p.node.audit import Audit, audit
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.stored import entry_of, tables_of
from spes_p2p.protocol.body import Remark
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.wire import RefusalReason
from spes_p2p.storage.ledger import Gap, Ledger
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

ROUNDS = 100


def chain_of(num_founders: int, num_rounds: int) -> MadeChain:
    chain = made_chain(num_founders, quick_config(), NUM_PARTS, turnover_every=30)
    chain.keep_heads = True
    return chain.grow(num_rounds)


CHAIN = chain_of(4, ROUNDS)


def join_run(folder: Path, chain: MadeChain = CHAIN) -> None:
    """The folder of a node that has the run's manifest."""
    manifest = chain.genesis.run.manifest
    signature = chain.peers[manifest.created_by].sign("run", encode(manifest))
    (folder / MANIFEST_FILE).write_bytes(encode(SignedRun(manifest, signature)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node's folder with the whole chain."""
    join_run(tmp_path)
    ledger = Ledger(tmp_path / LEDGER_FILE)
    store(ledger, CHAIN.genesis, [decode_certificate(data) for data in CHAIN.certificates])
    ledger.close()
    return tmp_path


def change(folder: Path, statement: str, *values: object) -> None:
    """Behind the ledger's back."""
    connection = sqlite3.connect(folder / LEDGER_FILE)
    with connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def finding(found: Audit) -> tuple[int | None, str | None, int, int]:
    """(round, problem, certificates checked, newest good round)."""
    return found.problem_round, found.problem, found.num_checked, found.head.round


def test_a_whole_chain_is_verified_and_counted(folder: Path) -> None:
    found = audit(folder)
    assert finding(found) == (None, None, ROUNDS, ROUNDS)
    assert found.head.hash == CHAIN.head.hash
    given = found.contributions.by_peer
    assert len(given) == 4 + 3  # founders, and newcomers of rounds 30, 60 and 90
    assert sum(one.updates for one in given.values()) == 4 * ROUNDS
    assert sum(one.tokens for one in given.values()) == 4 * ROUNDS * 1_000
    newcomer = given[max(CHAIN.head.state.roster, key=lambda row: row.voter_since or 0).peer]
    assert (newcomer.rounds, newcomer.updates, newcomer.tokens) == (10, 10, 10_000)
    assert set().union(*(one.shards for one in given.values())) == set(range(8))


def test_refusals_are_counted_by_reason_and_superseded_updates_give_nothing(tmp_path: Path) -> None:
    chain = made_chain(4, quick_config(), NUM_PARTS)
    body = structs.replace(
        chain.body(), refused=(Remark(0, RefusalReason.SUPERSEDED), Remark(1, RefusalReason.NOT_OWNER))
    )
    certificate = chain.certify(body)
    join_run(tmp_path, chain)
    ledger = Ledger(tmp_path / LEDGER_FILE)
    store(ledger, chain.genesis, [certificate])
    ledger.close()
    given = audit(tmp_path).contributions.by_peer
    first, second = (given[peer] for peer in chain.genesis.state.members[:2])
    assert (first.rounds, first.updates, first.tokens, dict(first.refusals)) == (1, 0, 0, {"superseded": 1})
    assert (second.rounds, second.updates, second.tokens, dict(second.refusals)) == (1, 1, 1_000, {"not owner": 1})


def test_a_folder_without_a_ledger_has_nothing_wrong_and_one_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has joined no run"):
        audit(tmp_path)
    join_run(tmp_path)
    assert finding(audit(tmp_path)) == (None, None, 0, 0)


@pytest.mark.parametrize("column", ["certificate", "body", "hash", "attachments"])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_flipped_byte_is_named_by_its_round(folder: Path, column: str, place: float) -> None:
    entry = entry_of(decode_certificate(CHAIN.certificates[69]))
    data = {"certificate": entry.certificate, "body": entry.body, "hash": entry.hash, "attachments": b"\0"}[column]
    wrong = flipped(data, int(place * len(data)))
    change(folder, f"UPDATE certificate SET {column} = ? WHERE round = 70", wrong)
    number, problem, num_checked, newest = finding(audit(folder))
    assert (number, num_checked, newest) == (70, 69, 69)
    assert problem


def test_every_byte_of_the_signatures_counts(folder: Path) -> None:
    certificate = decode_certificate(CHAIN.certificates[9])
    for place in range(3):
        signatures = list(certificate.signatures)
        signatures[place] = flipped(signatures[place], 20)
        forged = encode(structs.replace(certificate, signatures=tuple(signatures)))
        change(folder, "UPDATE certificate SET certificate = ? WHERE round = 10", forged)
        assert finding(audit(folder)) == (10, "a vote in a quorum has a wrong signature", 9, 9)


def test_a_byte_flipped_in_the_file_itself_is_found(folder: Path) -> None:
    path = folder / LEDGER_FILE
    data = path.read_bytes()
    at = data.index(decode_certificate(CHAIN.certificates[49]).signatures[0])
    path.write_bytes(flipped(data, at + 5))
    assert finding(audit(folder)) == (50, "a vote in a quorum has a wrong signature", 49, 49)


@pytest.mark.parametrize(
    "statement", ["DELETE FROM certificate WHERE round = 42", "UPDATE certificate SET final = 0 WHERE round = 42"]
)
def test_a_missing_certificate_is_named_by_its_round(folder: Path, statement: str) -> None:
    change(folder, statement)
    assert finding(audit(folder)) == (42, "its certificate is missing", 41, 41)


def test_the_ledger_of_another_run_is_found_at_its_first_round(folder: Path) -> None:
    join_run(folder, chain_of(3, 0))
    assert finding(audit(folder)) == (1, "a certificate of another run or round than 1", 0, 0)


def test_changed_tables_are_found(folder: Path) -> None:
    change(folder, "UPDATE tables SET data = ? WHERE round = 32", tables_of(CHAIN.heads[48]))
    assert finding(audit(folder)) == (32, "the tables kept beside it are not those that follow from it", 31, 31)


# --- gaps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def skipped(tmp_path: Path) -> Path:
    """Rounds 1 to 10, a gap, and rounds 20 to 24."""
    join_run(tmp_path)
    ledger = Ledger(tmp_path / LEDGER_FILE)
    certificates = [decode_certificate(data) for data in CHAIN.certificates]
    store(ledger, CHAIN.genesis, certificates[:10])
    gap = Gap(epoch=0, from_round=RoundNumber(10), to_round=RoundNumber(20), waypoints=(encode(CHAIN.waypoint(20)),))
    ledger.skip(gap, entry_of(certificates[19]), tables_of(CHAIN.heads[20], always=True))
    store(ledger, CHAIN.heads[20], certificates[20:24])
    ledger.close()
    return tmp_path


def test_a_gap_is_crossed_by_the_skip_rule_and_named(skipped: Path) -> None:
    found = audit(skipped)
    assert finding(found) == (None, None, 14, 24)
    assert found.skipped == [(11, 20)]
    assert found.head.hash == CHAIN.heads[24].hash


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda folder: change(folder, "DELETE FROM gap"), "its certificate is missing"),
        (lambda folder: change(folder, "UPDATE gap SET waypoint = ?", encode(CHAIN.waypoint(19))), "another one"),
        (lambda folder: change(folder, "UPDATE gap SET waypoint = ?", b"nonsense"), "malformed"),
        (lambda folder: change(folder, "DELETE FROM tables"), "another one"),
        (
            lambda folder: change(folder, "UPDATE tables SET data = ?", tables_of(CHAIN.heads[19], always=True)),
            "tables of round 20 do not match their roots",
        ),
    ],
)
def test_a_gap_that_nothing_vouches_for_is_named(skipped: Path, break_it: Callable[[Path], None], why: str) -> None:
    break_it(skipped)
    number, problem, num_checked, newest = finding(audit(skipped))
    assert problem is not None and why in problem
    assert (number, num_checked, newest) == (11 if why.endswith("missing") else 20, 10, 10)


def test_a_waypoint_that_nobody_signed_does_not_vouch(skipped: Path) -> None:
    waypoint = CHAIN.waypoint(20)
    forged = structs.replace(waypoint, certificate=structs.replace(waypoint.certificate, signatures=(bytes(64),) * 3))
    change(skipped, "UPDATE gap SET waypoint = ?", encode(forged))
    assert finding(audit(skipped)) == (20, "a vote in a quorum has a wrong signature", 10, 10)
