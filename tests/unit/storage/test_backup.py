"""A sealed key opens with its passphrase alone; anything else is told in one line and gives no key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import IdentityError
from spes_p2p.storage.backup import MAX_FILE_BYTES, peer_of, seal, unseal
from spes_p2p.storage.identity import load_identity, replace_identity
from spes_p2p.storage.lock import FolderLock, lock_holder

ME = Identity.from_seed(b"k" * 32)
OTHER = Identity.from_seed(b"o" * 32)
WORDS = "correct horse battery"
CHEAP = 1 << 14


def sealed() -> bytes:
    return seal(ME, WORDS, scrypt_n=CHEAP)


def changed(**changes: Any) -> bytes:
    fields = json.loads(sealed())
    for key, value in changes.items():
        if key in fields["scrypt"]:
            fields["scrypt"][key] = value
        else:
            fields[key] = value
    return json.dumps(fields).encode()


def refusal(data: bytes, passphrase: str = WORDS) -> str:
    with pytest.raises(IdentityError) as caught:
        unseal(data, passphrase, "key.json")
    message = str(caught.value)
    assert caught.value.exit_code == 6
    assert message.startswith("key.json ") and "\n" not in message
    return message


def test_the_passphrase_opens_what_it_sealed() -> None:
    assert unseal(sealed(), WORDS, "key.json").seed == ME.seed
    assert peer_of(sealed(), "key.json") == ME.text


def test_two_backups_of_one_key_have_nothing_secret_in_common() -> None:
    one, two = json.loads(sealed()), json.loads(sealed())
    assert one["scrypt"]["salt"] != two["scrypt"]["salt"]
    assert one["nonce"] != two["nonce"] and one["sealed"] != two["sealed"]
    assert ME.seed.hex() not in json.dumps(one)


def test_a_wrong_passphrase_is_told_in_one_line() -> None:
    assert "passphrase is wrong" in refusal(sealed(), WORDS + "!")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "no identity backup"),
        (sealed()[:200], "cut off"),
        (b"[1, 2]", "no identity backup"),
        (b'{"format": "else", "version": 1}', "is no identity backup"),
        (bytes(MAX_FILE_BYTES + 1), "too large"),
        (changed(version=2), "of version 2"),
        (changed(peer=OTHER.text), "was changed"),
        (changed(nonce="00" * 12), "was changed"),
        (changed(sealed="00" * 84), "was changed"),
        (changed(sealed="zz"), "hexadecimal"),
        (changed(nonce="00"), "wrong length"),
        (changed(n=1 << 30), "scrypt parameters"),
        (changed(n=1 << 15), "was changed"),
        (changed(r=1024), "scrypt parameters"),
        (changed(salt=7), "is damaged"),
        (changed(more=1), "is damaged"),
    ],
)
def test_a_damaged_backup_gives_no_key(data: bytes, words: str) -> None:
    assert words in refusal(data)


def test_every_changed_byte_is_noticed() -> None:
    good = sealed()
    for place in range(0, len(good), 37):
        bad = bytearray(good)
        bad[place] ^= 1
        with pytest.raises(IdentityError):
            unseal(bytes(bad), WORDS, "key.json")


def test_replacing_a_key_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    assert replace_identity(path, ME) is None
    kept = replace_identity(path, OTHER)
    again = replace_identity(path, ME)
    assert (kept, again) == (path.with_name("identity.key.old-1"), path.with_name("identity.key.old-2"))
    assert load_identity(path).seed == ME.seed
    assert load_identity(path.with_name("identity.key.old-1")).seed == ME.seed
    assert load_identity(path.with_name("identity.key.old-2")).seed == OTHER.seed


def test_looking_for_the_holder_of_a_lock_makes_nothing_and_takes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert lock_holder(folder) is None and not folder.exists()
    with FolderLock(folder):
        assert lock_holder(folder) == (folder / "node.lock").read_text().strip()
    assert lock_holder(folder) is None
    FolderLock(folder).close()
