"""Damaged files of a data folder, as in the cases from the field: one line that names the file, exit code 6, nothing
overwritten; and `doctor` finds each before anything else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.client.doctor import folder as in_folder
from spes_p2p.client.doctor.finding import Finding
from spes_p2p.errors import LocalStateError
from spes_p2p.node.control_client import find_control
from spes_p2p.node.files import (
    BLOBS_FOLDER,
    CONTROL_FILE,
    IDENTITY_FILE,
    JOURNAL_FILE,
    LEAVE_FILE,
    LEDGER_FILE,
    MANIFEST_FILE,
)
from spes_p2p.node.resume import drop_damaged
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.storage.ledger import Ledger
from spes_p2p.storage.lock import FolderLock
from spes_p2p.testing.chains import made_chain, store
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

Run = Callable[..., Any]
CHAIN = made_chain(4, quick_config(), NUM_PARTS).grow(3)
SOUND = {
    "link": "ok",
    "run": "ok",
    "ledger": "ok",
    "control": "ok",
    "limits": "ok",
    "month": "ok",
    "journal": "ok",
    "blobs": "ok",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with a sound file of every kind, of a node that was killed."""
    path = tmp_path / "node"
    load_or_create_identity(path / IDENTITY_FILE)
    manifest = CHAIN.genesis.run.manifest
    signature = CHAIN.peers[manifest.created_by].sign("run", encode(manifest))
    (path / MANIFEST_FILE).write_bytes(encode(SignedRun(manifest, signature)))
    (path / "link").write_text(f"spes-p2p:{CHAIN.genesis.run.run_id.hex()}\n")
    (path / "limits.json").write_text('{"upload": 1000000}')
    (path / "month.json").write_text('{"month": "2026-11", "up_bytes": 3000000, "down_bytes": 0}')
    gone = {"url": "http://127.0.0.1:1", "token": "t", "pid": 2**22 + 1}
    (path / CONTROL_FILE).write_text(json.dumps(gone))
    ledger = Ledger(path / LEDGER_FILE)
    store(ledger, CHAIN.genesis, [decode_certificate(data) for data in CHAIN.certificates])
    ledger.close()
    journal = SqliteJournal(path / JOURNAL_FILE)
    journal.put({"vote": b"yes"})
    journal.close()
    DiskBlobs(path / BLOBS_FOLDER).put(b"blob" * 1000)
    return path


def found(folder: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in in_folder.state(folder, is_running=False)}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_sound_folder_is_found_sound_and_left_as_it_is(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.suffix in ("", ".key", ".json", ".manifest")
              and path.is_file()}  # fmt: skip
    assert {name: finding.status for name, finding in found(folder).items()} == SOUND
    assert found(folder)["ledger"].fact == "sound, up to round 3"
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("damage", [empty, cut, scribble])
@pytest.mark.parametrize(
    ("check", "file"),
    [
        ("link", "link"),
        ("run", MANIFEST_FILE),
        ("ledger", LEDGER_FILE),
        ("control", CONTROL_FILE),
        ("limits", "limits.json"),
        ("month", "month.json"),
        ("journal", JOURNAL_FILE),
    ],
)
def test_the_doctor_names_a_damaged_file_and_its_remedy(
    folder: Path, check: str, file: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / file)
    data = (folder / file).read_bytes()
    finding = found(folder)[check]
    assert finding.status == "fail" and file in finding.fact, finding
    assert finding.remedy and "\n" not in finding.fact + finding.remedy
    assert {name: one.status for name, one in found(folder).items() if name != check} == {
        name: status for name, status in SOUND.items() if name != check
    }
    if file not in (LEDGER_FILE, JOURNAL_FILE):
        assert (folder / file).read_bytes() == data


def test_the_doctor_finds_what_the_next_start_would_refuse(folder: Path) -> None:
    assert found(folder)["limits"].fact == "sound, upload"
    assert found(folder)["month"].fact == "3.0 MB counted in 2026-11"
    (folder / "limits.json").write_text('{"upload": "fast"}')
    (folder / "month.json").write_text('{"month": 11}')
    assert {name for name, finding in found(folder).items() if finding.status == "fail"} == {"limits", "month"}


@pytest.mark.parametrize("damage", [empty, cut, scribble])
@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("identity show", IDENTITY_FILE),
        ("identity backup {folder}/backup.json", IDENTITY_FILE),
        ("status", CONTROL_FILE),
        ("leave", CONTROL_FILE),
        ("ledger show", LEDGER_FILE),
        ("ledger show", MANIFEST_FILE),
        ("ledger leaderboard", LEDGER_FILE),
        ("ledger leaderboard", MANIFEST_FILE),
        ("ledger show --peer me", LEDGER_FILE),
        ("ledger show --peer me", IDENTITY_FILE),
        ("ledger verify", MANIFEST_FILE),
    ],
)
def test_a_command_that_needs_a_damaged_file_ends_with_6_and_names_it(
    spes_p2p: Run, folder: Path, command: str, file: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / file)
    answer = spes_p2p(*command.format(folder=folder).split(), "--data-dir", folder)
    assert (answer.code, answer.out) == (6, ""), answer
    assert file in answer.err and len(answer.err.splitlines()) <= 2


def test_why_a_node_ended_is_in_its_log_file_too(spes_p2p: Run, folder: Path, tmp_path: Path) -> None:
    scribble(folder / "limits.json")
    log = tmp_path / "node.log"
    answer = spes_p2p("join", "--headless", "--gpu", "none", "--data-dir", folder, "--log-json", "--log-file", log)
    assert (answer.code, answer.out) == (6, "")
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["level"], last["event"]) == ("error", " ".join(answer.err.split()))
    assert "limits.json is damaged" in last["event"]


@pytest.mark.parametrize("damage", [empty, cut, scribble])
def test_a_damaged_journal_is_never_replaced_by_an_empty_one(folder: Path, damage: Callable[[Path], None]) -> None:
    path = folder / JOURNAL_FILE
    damage(path)
    with pytest.raises(LocalStateError, match=JOURNAL_FILE) as caught:
        SqliteJournal(path)
    assert caught.value.exit_code == 6 and "backup" in str(caught.value)


def test_a_damaged_blob_is_told_by_the_doctor_and_dropped_by_the_next_start(folder: Path) -> None:
    (path,) = (folder / BLOBS_FOLDER / "whole").glob("??/" + "?" * 64)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"!")
    finding = found(folder)["blobs"]
    assert (finding.status, finding.fact) == ("warn", f"1 of 1 blob damaged, such as {path.name[:12]}")
    assert path.read_bytes() != good, "the doctor only looks"
    assert len(drop_damaged(DiskBlobs(folder / BLOBS_FOLDER))) == 1
    assert not path.exists()


def test_a_wish_to_leave_is_a_fact_whatever_is_in_its_file(folder: Path) -> None:
    (folder / LEAVE_FILE).write_bytes(b"\xff\x00rubbish")
    finding = found(folder)["leave"]
    assert finding.status == "warn" and LEAVE_FILE in finding.fact
    assert "stay" in finding.remedy


def test_what_a_killed_node_left_is_no_damage_and_no_running_node(folder: Path) -> None:
    assert "killed" in found(folder)["control"].fact
    with pytest.raises(Exception, match="no node runs in"):
        find_control(folder)


def test_the_lock_and_the_key_are_told(folder: Path) -> None:
    assert in_folder.lock(folder).status == "ok"
    with FolderLock(folder):
        assert in_folder.lock(folder).status == "warn"
        assert "process" in in_folder.lock(folder).fact
    assert in_folder.key(folder).status == "ok"
    (folder / IDENTITY_FILE).chmod(0o644)
    finding = in_folder.key(folder)
    assert finding.status == "fail" and "chmod 600" in finding.remedy
    (folder / IDENTITY_FILE).chmod(0o600)
    folder.chmod(0o777)
    assert in_folder.key(folder).status == "warn"


def test_a_failing_check_ends_the_doctor_with_5_and_is_in_its_json(
    spes_p2p: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.client.doctor.machine.WRITTEN_BYTES", 1 << 10)
    (tmp_path / "text.txt").write_text("text")
    arguments = ["doctor", "--gpu", "none", "--data-dir", folder, "--data", tmp_path / "text.txt"]
    answer = spes_p2p(*arguments, "--json")
    assert (answer.code, json.loads(answer.out)["ok"]) == (0, True)
    scribble(folder / IDENTITY_FILE)
    answer = spes_p2p(*arguments, "--json")
    report = json.loads(answer.out)
    assert (answer.code, report["ok"], answer.err) == (5, False, "")
    (failed,) = [check for check in report["checks"] if check["status"] == "fail"]
    assert failed["check"] == "key" and "is damaged" in failed["fact"] and failed["remedy"]
    lines = spes_p2p(*arguments).out.splitlines()
    assert len(lines) == len(report["checks"])
    assert all((" -> " in line) != line.startswith("ok ") for line in lines)
