"""The identity file is created once, whole, and never overwritten; damage is told with path and remedy."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import IdentityError
from spes_p2p.storage.atomic import TEMP_PREFIX
from spes_p2p.storage.identity import load_identity, load_or_create_identity

KEY = Identity.from_seed(b"k" * 32).to_libp2p_bytes()
OTHER = Identity.from_seed(b"o" * 32).to_libp2p_bytes()
PEM = b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----\n"

FIRST_START = """
import sys
from pathlib import Path
from spes_p2p.storage.identity import load_or_create_identity
sys.stdin.readline()
print(load_or_create_identity(Path(sys.argv[1])).text)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_key(path: Path, data: bytes, mode: int = 0o600) -> None:
    path.write_bytes(data)
    path.chmod(mode)


def test_the_first_start_makes_a_key_and_later_ones_read_it(tmp_path: Path) -> None:
    path = tmp_path / "data" / "identity.key"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert path.read_bytes() == first.to_libp2p_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_folders_get_two_keys(tmp_path: Path) -> None:
    assert load_or_create_identity(tmp_path / "a").peer_id != load_or_create_identity(tmp_path / "b").peer_id


def test_several_first_starts_at_once_get_one_key(tmp_path: Path) -> None:
    path = tmp_path / "data" / "identity.key"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_START, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    texts = {start.communicate()[0].strip() for start in starts}
    assert texts == {load_identity(path).text}


def test_a_start_killed_while_it_made_the_key_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f"{TEMP_PREFIX}0011").write_bytes(KEY[:20])
    identity = load_or_create_identity(tmp_path / "identity.key")
    assert names(tmp_path) == ["identity.key", "identity.key.lock"]
    assert (tmp_path / "identity.key").read_bytes() == identity.to_libp2p_bytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (KEY[:-1], "67 bytes instead of 68"),
        (KEY + b"\n", "not an Ed25519 key"),
        (PEM, "PEM text"),
        (KEY[:36] + OTHER[36:], "not an Ed25519 key"),
        (b"\x08\x00" + bytes(66), "not an Ed25519 key"),
        (bytes(10_000), "not an Ed25519 key"),
    ],
    ids=["empty", "truncated", "longer", "pem", "halves of two keys", "rsa", "large"],
)
def test_a_damaged_key_is_named_with_a_remedy_and_left_alone(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "identity.key"
    write_key(path, data)
    for load in (load_identity, load_or_create_identity):
        with pytest.raises(IdentityError) as caught:
            load(path)
        message = str(caught.value)
        assert str(path) in message
        assert words in message
        assert "backup" in message
        assert message.count("\n") == 1
    assert path.read_bytes() == data
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("mode", "words"), [(0o000, "cannot be read"), (0o200, "cannot be read"), (0o644, "open to"), (0o660, "open to")]
)
def test_a_mode_that_keeps_the_owner_out_or_lets_others_in_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    path = tmp_path / "identity.key"
    write_key(path, KEY, mode)
    with pytest.raises(IdentityError, match=words) as caught:
        load_or_create_identity(path)
    assert f"chmod 600 {path}" in str(caught.value)
    path.chmod(0o600)
    assert load_or_create_identity(path).to_libp2p_bytes() == KEY


def test_a_key_that_its_owner_may_only_read_is_good(tmp_path: Path) -> None:
    write_key(tmp_path / "identity.key", KEY, 0o400)
    assert load_identity(tmp_path / "identity.key").to_libp2p_bytes() == KEY


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity.key").mkdir()
    with pytest.raises(IdentityError, match="is a folder"):
        load_or_create_identity(tmp_path / "identity.key")


def test_a_pipe_in_its_place_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "identity.key", 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        load_or_create_identity(tmp_path / "identity.key")


def test_a_link_to_nowhere_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(IdentityError, match="No such file"):
        load_or_create_identity(path)
    assert path.is_symlink()
    assert not (tmp_path / "gone").exists()


def test_reading_alone_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="No such file"):
        load_identity(tmp_path / "none" / "identity.key")
    assert names(tmp_path) == []
