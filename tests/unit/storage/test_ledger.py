"""Certificates are kept as they came, and the chain of final ones only extends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import LocalProtocolError, LocalStateError, MachineError
from spes_p2p.ids import RoundNumber
from spes_p2p.storage.ledger import Gap, Ledger, LedgerEntry, OwnUpdate

READER = """
import sys
from pathlib import Path
from spes_p2p.storage.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
print(ledger.count())
ledger.close()
"""


def entry(number: int, *, epoch: int = 0, final: bool = True, variant: bytes = b"") -> LedgerEntry:
    body = b"body %d %d %d " % (epoch, number, final) + variant
    return LedgerEntry(
        epoch=epoch,
        round=RoundNumber(number),
        hash=digest("test", body),
        body=body,
        certificate=body + b" signed",
        attachments=b"\x00receipts\xff",
        final=final,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = Ledger(path)
    yield opened
    opened.close()


def test_a_new_ledger_has_no_certificate(ledger: Ledger) -> None:
    assert ledger.latest() is None
    assert ledger.count() == 0
    assert list(ledger.range(RoundNumber(0), RoundNumber(99))) == []


def test_certificates_are_found_by_round_and_hash_after_a_restart(ledger: Ledger, path: Path) -> None:
    entries = [entry(number) for number in range(3)]
    assert [ledger.append(one) for one in entries] == [True, True, True]
    ledger.close()
    again = Ledger(path)
    assert [again.by_round(one.round) for one in entries] == entries
    assert [again.by_hash(one.hash) for one in entries] == entries
    assert again.latest() == entries[2]
    assert again.count() == 3
    assert again.by_round(RoundNumber(3)) is None
    assert again.by_hash(digest("test", b"none")) is None
    again.close()


def test_a_second_final_for_one_epoch_and_round_is_our_bug_and_changes_nothing(ledger: Ledger) -> None:
    first, second = entry(1), entry(1, variant=b"fork")
    ledger.append(first)
    with pytest.raises(LocalProtocolError, match=r"round 1 \(epoch 0\) is already final"):
        ledger.append(second, meta={"tip": b"fork"})
    assert ledger.by_round(RoundNumber(1)) == first
    assert ledger.by_hash(second.hash) is None
    assert ledger.get_meta("tip") is None


def test_the_same_body_again_keeps_the_first_signatures(ledger: Ledger) -> None:
    first = entry(1)
    ledger.append(first)
    assert not ledger.append(replace(first, certificate=b"other signers"))
    assert ledger.by_round(RoundNumber(1)) == first
    assert ledger.count() == 1


def test_tentative_certificates_may_compete_and_never_count_as_final(ledger: Ledger) -> None:
    branches = [entry(1, final=False, variant=variant) for variant in (b"left", b"right")]
    for branch in branches:
        ledger.append(branch)
    assert [ledger.by_hash(branch.hash) for branch in branches] == branches
    assert ledger.by_round(RoundNumber(1)) is None
    assert ledger.latest() is None
    assert ledger.count() == 0
    final = entry(1)
    ledger.append(final)
    assert ledger.by_round(RoundNumber(1)) == final


def test_a_new_epoch_takes_precedence(ledger: Ledger) -> None:
    old, older, new = entry(5), entry(6), entry(5, epoch=1)
    for one in (old, older, new):
        ledger.append(one)
    assert ledger.latest() == new
    assert ledger.by_round(RoundNumber(5)) == new
    assert list(ledger.range(RoundNumber(5), RoundNumber(6))) == [old, older, new]


def test_range_gives_the_final_ones_in_order_across_pages(ledger: Ledger) -> None:
    entries = [entry(number) for number in range(150)]
    for one in reversed(entries):
        ledger.append(one)
    ledger.append(entry(3, final=False))
    assert list(ledger.range(RoundNumber(2), RoundNumber(140))) == entries[2:141]
    assert list(ledger.range(RoundNumber(5), RoundNumber(4))) == []


def test_meta_is_set_with_the_certificate_or_not_at_all(ledger: Ledger) -> None:
    ledger.append(entry(1), meta={"state": b"after 1"})
    assert ledger.get_meta("state") == b"after 1"
    ledger.append(entry(1), meta={"state": b"again"})
    assert ledger.get_meta("state") == b"again"
    ledger.set_meta("state", b"")
    assert ledger.get_meta("state") == b""
    assert ledger.get_meta("other") is None


def test_many_certificates_are_added_all_or_none(ledger: Ledger) -> None:
    ledger.extend([(entry(number), b"") for number in (1, 2)])
    assert [one.round for one in ledger.range(RoundNumber(0), RoundNumber(9))] == [1, 2]
    with pytest.raises(LocalProtocolError, match="round 2"):
        ledger.extend([(entry(3), b"tables"), (entry(2, variant=b"fork"), b"")])
    assert ledger.latest() == entry(2)
    assert ledger.tables_before(9) is None


def test_the_newest_kept_tables_up_to_a_round_are_found(ledger: Ledger) -> None:
    ledger.append(entry(1), tables=b"after 1")
    ledger.extend([(entry(2), b""), (entry(3), b"after 3")])
    assert ledger.tables_before(0) is None
    assert ledger.tables_before(2) == (entry(1).hash, b"after 1")
    assert ledger.tables_before(3) == ledger.tables_before(99) == (entry(3).hash, b"after 3")


def test_a_gap_comes_with_its_far_side_and_what_vouches_for_it(ledger: Ledger, path: Path) -> None:
    gaps = [
        Gap(epoch=0, from_round=RoundNumber(0), to_round=RoundNumber(5), waypoints=(b"3", b"5")),
        Gap(epoch=0, from_round=RoundNumber(6), to_round=RoundNumber(9), waypoints=(b"9",)),
    ]
    for gap in reversed(gaps):
        ledger.skip(gap, entry(gap.to_round), b"tables")
    ledger.close()
    again = Ledger(path)
    assert again.gaps() == tuple(gaps)
    assert [one.round for one in again.range(RoundNumber(0), RoundNumber(9))] == [5, 9]
    assert again.tables_before(8) == (entry(5).hash, b"tables")
    again.close()


def test_the_latest_verdict_on_each_own_update_counts(ledger: Ledger) -> None:
    for number in range(5):
        ledger.record_update(OwnUpdate(round=RoundNumber(number), verdict="pending", tokens=100 + number))
    ledger.record_update(OwnUpdate(round=RoundNumber(3), verdict="accepted", tokens=103))
    assert ledger.updates(3) == (
        OwnUpdate(round=RoundNumber(2), verdict="pending", tokens=102),
        OwnUpdate(round=RoundNumber(3), verdict="accepted", tokens=103),
        OwnUpdate(round=RoundNumber(4), verdict="pending", tokens=104),
    )


def test_another_process_reads_while_this_one_writes(ledger: Ledger, path: Path) -> None:
    ledger.append(entry(1))
    with ledger._database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('open', x'00')")
        done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def fill(ledger: Ledger) -> None:
    for number in range(50):
        ledger.append(replace(entry(number), attachments=bytes([number]) * 5000))
    ledger.close()


def test_a_truncated_ledger_is_refused_with_path_and_remedy(ledger: Ledger, path: Path) -> None:
    fill(ledger)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(LocalStateError) as caught:
        Ledger(path)
    assert str(path) in str(caught.value)
    assert "fetched from the run's peers" in str(caught.value)


def test_damage_in_the_middle_is_found_by_check(ledger: Ledger, path: Path) -> None:
    fill(ledger)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 8192)
    damaged = Ledger(path)
    with pytest.raises(LocalStateError, match="is damaged"):
        damaged.check()
    damaged.close()


def test_a_full_disk_keeps_the_chain_as_it_was(ledger: Ledger) -> None:
    ledger.append(entry(1), meta={"tip": b"1"})
    ledger._database.query("PRAGMA max_page_count=10")
    with pytest.raises(MachineError, match="disk full"):
        ledger.append(replace(entry(2), attachments=bytes(500_000)), meta={"tip": b"2"})
    assert ledger.latest() == entry(1)
    assert ledger.get_meta("tip") == b"1"
