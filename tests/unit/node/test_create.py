"""Starting a run: all of it, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import DataError, IdentityError, MachineError, UsageError
from spes_p2p.node import create
from spes_p2p.node.create import create_run
from spes_p2p.node.history import read_history, read_manifest
from spes_p2p.protocol.codec import run_id
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.lock import FolderLock
from spes_p2p.testing.training import tiny_run

CONFIG = tiny_run(held_out_bytes=1_024)
DOCUMENTS = [bytes([97 + number % 26]) * 300 for number in range(26)]


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_run_has_its_manifest_its_state_and_its_invite_link(tmp_path: Path) -> None:
    friend = Identity.from_seed(b"f" * 32).peer_id
    link = create_run(CONFIG, tmp_path / "run", founders=[friend], documents=DOCUMENTS, bootstrap=["/dns4/b/tcp/1"])
    signed = read_manifest(tmp_path / "run")
    assert signed is not None
    manifest = signed.manifest
    assert link.run == run_id(manifest)
    assert link.bootstrap == ("/dns4/b/tcp/1",)
    assert link.invite_seed is not None
    assert Identity.from_seed(link.invite_seed).peer_id == manifest.invite_key
    assert manifest.founders == tuple(sorted([friend, load_or_create_identity(tmp_path / "run/identity.key").peer_id]))
    blobs = DiskBlobs(tmp_path / "run" / "blobs")
    assert all(blobs.verify(blob) for blob in (*manifest.parts, *manifest.shards, manifest.held_out))
    assert read_history(tmp_path / "run") == []
    secrets = [path for path in (tmp_path / "run").iterdir() if path.suffix == ".key"]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_open_run_has_no_invite_key(tmp_path: Path) -> None:
    config = tiny_run(held_out_bytes=1_024, protocol={"admission": "open"})
    assert create_run(config, tmp_path / "run", documents=DOCUMENTS).invite_seed is None


def test_too_little_text_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        create_run(CONFIG, tmp_path / "run", documents=[b"short"])
    assert listing(tmp_path) == set()


def test_full_disk_leaves_a_new_folder_away_and_an_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MachineError("disk full: cannot write in blobs")

    monkeypatch.setattr(create, "make_genesis", full)
    with pytest.raises(MachineError):
        create_run(CONFIG, tmp_path / "new", documents=DOCUMENTS)
    assert listing(tmp_path) == set()

    old = tmp_path / "old"
    identity = load_or_create_identity(old / "identity.key")
    FolderLock(old).close()
    (old / "note").write_text("mine")
    before = listing(old)
    with pytest.raises(MachineError):
        create_run(CONFIG, old, documents=DOCUMENTS)
    assert listing(old) == before
    assert load_or_create_identity(old / "identity.key").peer_id == identity.peer_id


def test_second_run_in_one_folder_is_refused_and_the_first_untouched(tmp_path: Path) -> None:
    link = create_run(CONFIG, tmp_path / "run", documents=DOCUMENTS)
    before = listing(tmp_path)
    with pytest.raises(UsageError, match="belongs to a run already"):
        create_run(CONFIG, tmp_path / "run", documents=DOCUMENTS)
    assert listing(tmp_path) == before
    signed = read_manifest(tmp_path / "run")
    assert signed is not None
    assert run_id(signed.manifest) == link.run


def test_folder_of_a_running_node_is_left_alone(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run"):
        before = listing(tmp_path)
        with pytest.raises(IdentityError, match="in use"):
            create_run(CONFIG, tmp_path / "run", documents=DOCUMENTS)
        assert listing(tmp_path) == before
