"""The recovery key's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import LocalStateError
from spes_p2p.node.files import RECOVERY_FILE
from spes_p2p.node.recovery import read_recovery_key
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
MANIFEST = cases.genesis_of(FOUNDERS).run.manifest
KEY = next(peer for peer in cases.identities(3) if peer.peer_id == MANIFEST.recovery_key)


def test_the_key_is_read_where_the_run_was_created_and_nowhere_else(tmp_path: Path) -> None:
    assert read_recovery_key(tmp_path, MANIFEST) is None
    (tmp_path / RECOVERY_FILE).write_text(KEY.seed.hex())
    found = read_recovery_key(tmp_path, MANIFEST)
    assert found is not None and found.peer_id == MANIFEST.recovery_key


@pytest.mark.parametrize(
    ("text", "words"), [("", "damaged"), ("zz", "damaged"), ("00" * 32, "recovery key of another run")]
)
def test_a_damaged_or_foreign_key_is_named_with_a_remedy(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / RECOVERY_FILE).write_text(text)
    with pytest.raises(LocalStateError, match=words) as raised:
        read_recovery_key(tmp_path, MANIFEST)
    assert str(tmp_path / RECOVERY_FILE) in str(raised.value)
