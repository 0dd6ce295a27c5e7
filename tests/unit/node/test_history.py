"""Reading a data folder's rounds: beside a running node, after its end, and after damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spes_p2p.errors import LocalStateError
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.history import read_history, read_manifest
from spes_p2p.testing.nodes import node_swarm


async def test_history_is_the_same_beside_the_running_node_after_a_kill_and_in_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada"])
        ada = await swarm.start("ada")
        await swarm.wait(lambda: ada.driver.tally.rounds_adopted >= 2, "second round")
        folder = swarm.data_dir("ada")
        beside = read_history(folder)
        assert [record.round for record in beside] == list(range(1, len(beside) + 1))
        assert beside[0].updates == 0  # round 1 is for claims
        assert beside[1].updates == 1
        assert beside[1].tokens > 0
        copy, append = tmp_path / "copy", ada.tools.ledger.append

        def copy_before(*entry: object, **more: object) -> None:
            """While nothing else writes; as a crash would leave it: the write-ahead log is not folded in."""
            if not copy.exists():
                copy.mkdir()
                for file in (MANIFEST_FILE, LEDGER_FILE, f"{LEDGER_FILE}-wal"):
                    shutil.copy(folder / file, copy / file)
            append(*entry, **more)

        monkeypatch.setattr(ada.tools.ledger, "append", copy_before)
        await swarm.wait_round(len(beside) + 2)
        await swarm.kill("ada")
        assert read_history(copy)[: len(beside)] == beside
        after = read_history(folder)
        assert after[: len(beside)] == beside
        assert after[-1].psi_digest == ada.driver.machine.head.psi_digest.hex() or len(after) < ada.round


def test_folder_without_a_run_has_no_history(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_history(tmp_path) == []


def test_damaged_manifest_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(b"\x00" * 40)
    with pytest.raises(LocalStateError, match="is damaged") as raised:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST_FILE) in str(raised.value)


async def test_ledger_of_another_run_is_found(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "one") as one, node_swarm(tmp_path / "two") as two:
        one.create(["ada"])
        ada = await one.start("ada")
        await one.wait(lambda: ada.driver.tally.rounds_adopted >= 1, "first round")
        await one.kill("ada")
        two.create(["ben"])
        shutil.copy(one.data_dir("ada") / LEDGER_FILE, two.data_dir("ben") / LEDGER_FILE)
        with pytest.raises(LocalStateError, match="does not fit its run at round 1"):
            read_history(two.data_dir("ben"))
