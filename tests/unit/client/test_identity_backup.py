"""`identity backup` and `identity restore`: a key that moves to another machine, and what they refuse."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.client import passphrase as asking
from spes_p2p.crypto import Identity
from spes_p2p.storage import backup as backups
from spes_p2p.storage.identity import load_identity, load_or_create_identity
from spes_p2p.storage.lock import FolderLock

Run = Callable[..., Any]
OTHER = Identity.from_seed(b"o" * 32)


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least cost that is allowed; `tests/unit/storage/test_backup.py` is about what sealing is."""
    real = backups.seal
    monkeypatch.setattr(backups, "seal", lambda identity, passphrase: real(identity, passphrase, scrypt_n=1 << 14))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words"
    path.write_text("correct horse battery\nsecond line\n")
    return path


@pytest.fixture
def saved(spes_p2p: Run, tmp_path: Path, words: Path) -> tuple[str, Path]:
    """Peer id and backup of folder `old`."""
    identity = load_or_create_identity(tmp_path / "old" / "identity.key")
    file = tmp_path / "key.json"
    answer = spes_p2p("identity", "backup", file, "--data-dir", tmp_path / "old", "--passphrase-file", words)
    assert (answer.code, answer.err) == (0, "")
    return identity.text, file


def refused(answer: Any, code: int, *expected: str) -> None:
    assert (answer.code, answer.out) == (code, "")
    assert 1 <= len(answer.err.splitlines()) <= 2 and "Traceback" not in answer.err
    for text in expected:
        assert text in answer.err


def test_a_key_moves_to_another_folder(spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]) -> None:
    peer, file = saved
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    arguments = ["--data-dir", tmp_path / "new", "--passphrase-file", words, "--json"]
    answer = spes_p2p("identity", "restore", file, *arguments)
    assert answer.code == 0
    assert json.loads(answer.out) == {"peer": peer, "file": str(tmp_path / "new" / "identity.key"), "kept": None}
    assert load_identity(tmp_path / "new" / "identity.key").text == peer
    assert spes_p2p("identity", "restore", file, *arguments).code == 0, "the same key again is nothing to refuse"


def test_another_key_is_replaced_only_by_force_and_kept(
    spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]
) -> None:
    peer, file = saved
    path = tmp_path / "new" / "identity.key"
    other = load_or_create_identity(path).text
    arguments = ["identity", "restore", file, "--data-dir", path.parent, "--passphrase-file", words]
    refused(spes_p2p(*arguments), 2, str(path), "another key", "--force")
    assert load_identity(path).text == other
    answer = spes_p2p(*arguments, "--force")
    assert answer.code == 0 and "identity.key.old-1" in answer.out
    assert "the old node has ended" in answer.err
    assert load_identity(path).text == peer
    assert load_identity(path.with_name("identity.key.old-1")).text == other


def test_a_damaged_key_gives_way_to_a_backup_only_by_force(
    spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]
) -> None:
    path = tmp_path / "old" / "identity.key"
    path.write_bytes(b"")
    arguments = ["identity", "restore", saved[1], "--data-dir", path.parent, "--passphrase-file", words]
    refused(spes_p2p(*arguments), 2, "is damaged: it is empty", "--force")
    assert path.read_bytes() == b""
    assert spes_p2p(*arguments, "--force").code == 0
    assert load_identity(path).text == saved[0]


def test_nothing_is_restored_under_a_running_node(
    spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]
) -> None:
    with FolderLock(tmp_path / "new"):
        answer = spes_p2p(
            "identity", "restore", saved[1], "--data-dir", tmp_path / "new", "--passphrase-file", words, "--force"
        )
    refused(answer, 6, "identity in use")
    assert not (tmp_path / "new" / "identity.key").exists()


def test_a_wrong_passphrase_and_a_damaged_file_end_with_6(
    spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]
) -> None:
    arguments = ["identity", "restore", saved[1], "--data-dir", tmp_path / "new", "--passphrase-file", words]
    words.write_text("another passphrase\n")
    refused(spes_p2p(*arguments), 6, str(saved[1]), "passphrase is wrong")
    saved[1].write_bytes(saved[1].read_bytes()[:100])
    refused(spes_p2p(*arguments), 6, str(saved[1]), "cut off")
    assert not (tmp_path / "new").exists()


def test_a_backup_is_not_overwritten_unless_told_to(
    spes_p2p: Run, tmp_path: Path, words: Path, saved: tuple[str, Path]
) -> None:
    arguments = ["identity", "backup", saved[1], "--data-dir", tmp_path / "old", "--passphrase-file", words]
    before = saved[1].read_bytes()
    refused(spes_p2p(*arguments), 2, "is there already", "--force")
    assert saved[1].read_bytes() == before
    assert spes_p2p(*arguments, "--force").code == 0
    assert saved[1].read_bytes() != before


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), (b"", "first line is empty"), (b"\nx", "first line is empty"), (b"\xff", "UTF-8")],
)
def test_a_passphrase_file_of_no_use_is_named(
    spes_p2p: Run, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    load_or_create_identity(tmp_path / "old" / "identity.key")
    if content is not None:
        (tmp_path / "bad").write_bytes(content)
    arguments = ["--data-dir", tmp_path / "old", "--passphrase-file", tmp_path / "bad"]
    refused(spes_p2p("identity", "backup", tmp_path / "key.json", *arguments), 2, "--passphrase-file", expected)
    assert not (tmp_path / "key.json").exists()


def test_a_short_passphrase_is_refused(spes_p2p: Run, tmp_path: Path, words: Path) -> None:
    load_or_create_identity(tmp_path / "old" / "identity.key")
    words.write_text("short\n")
    arguments = ["--data-dir", tmp_path / "old", "--passphrase-file", words]
    refused(spes_p2p("identity", "backup", tmp_path / "key.json", *arguments), 2, "8 characters")


def test_without_a_terminal_a_passphrase_file_is_asked_for(spes_p2p: Run, tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "old" / "identity.key")
    answer = spes_p2p("identity", "backup", tmp_path / "key.json", "--data-dir", tmp_path / "old")
    refused(answer, 2, "--passphrase-file")


def test_a_new_passphrase_is_asked_for_twice(spes_p2p: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create_identity(tmp_path / "old" / "identity.key")
    asked: list[tuple[bool, bool]] = []

    def prompt(question: str, *, hide_input: bool, confirmation_prompt: bool) -> str:
        asked.append((hide_input, confirmation_prompt))
        return "correct horse battery"

    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(asking.typer, "prompt", prompt)
    file = tmp_path / "key.json"
    assert spes_p2p("identity", "backup", file, "--data-dir", tmp_path / "old").code == 0
    assert spes_p2p("identity", "restore", file, "--data-dir", tmp_path / "new").code == 0
    assert asked == [(True, True), (True, False)]


def test_a_folder_without_a_key_has_nothing_to_back_up(spes_p2p: Run, tmp_path: Path) -> None:
    refused(spes_p2p("identity", "backup", tmp_path / "key.json", "--data-dir", tmp_path), 6, "identity.key")
    assert not (tmp_path / "identity.key").exists()


def test_bad_places_for_a_backup_are_refused(spes_p2p: Run, tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "identity.key")
    refused(spes_p2p("identity", "backup", tmp_path, "--data-dir", tmp_path), 2, "is a folder")
    refused(spes_p2p("identity", "backup", tmp_path / "no" / "f", "--data-dir", tmp_path), 2, "no such folder")
    refused(spes_p2p("identity", "restore", tmp_path / "no", "--data-dir", tmp_path), 2, "No such file")
    refused(spes_p2p("identity", "restore", tmp_path, "--data-dir", tmp_path), 2, "Is a directory")
