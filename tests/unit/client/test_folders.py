"""One data folder per identity and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.client import cli, folders, launch
from spes_p2p.client.commands.join import find_link
from spes_p2p.client.settings import Choices
from spes_p2p.crypto import Identity
from spes_p2p.errors import LinkError, LocalStateError, UsageError
from spes_p2p.node.files import MANIFEST_FILE

ONE, TWO = "1f" * 32, "2e" * 32
ENTRY = f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.from_seed(bytes(32)).text}"


def belongs(folder: Path, link: str) -> None:
    folders.remember(folder, link)
    (folder / MANIFEST_FILE).touch()


def test_link_that_led_nowhere_claims_no_folder(home: Path) -> None:
    folders.remember(home / "default", f"spes-p2p:{ONE}")
    assert folders.folder_for(TWO, None) == home / "default"
    assert find_link(Choices()).run.hex() == ONE


def test_first_run_gets_the_default_folder_and_keeps_it(home: Path) -> None:
    assert folders.folder_for(ONE, None) == home / "default"
    belongs(home / "default", f"spes-p2p:{ONE}")
    assert folders.folder_for(ONE, None) == home / "default"


def test_second_run_gets_a_folder_of_its_own(home: Path) -> None:
    belongs(home / "default", f"spes-p2p:{ONE}")
    assert folders.folder_for(TWO, None) == home / f"run-{TWO[:12]}"


def test_named_folder_serves_one_run_only(tmp_path: Path) -> None:
    belongs(tmp_path / "node", f"spes-p2p:{ONE},invite=x")
    assert folders.folder_for(ONE, tmp_path / "node") == tmp_path / "node"
    with pytest.raises(UsageError, match="belongs to another run"):
        folders.folder_for(TWO, tmp_path / "node")


def test_last_run_is_found_again(home: Path, tmp_path: Path) -> None:
    folders.remember(home / "default", f"spes-p2p:{ONE}")
    folders.remember(tmp_path / "node", f"spes-p2p:{TWO}")
    assert folders.find_folder(None, None) == tmp_path / "node"
    assert find_link(Choices()).run.hex() == TWO


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "node"),
        (["--run", "2e2e"], "home/run-2"),
        (["--data-dir", "new"], "new"),
        ([f"spes-p2p:{ONE}"], "home/default"),
    ],
)
def test_join_without_a_link_goes_on_in_the_folder_of_that_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], folder: str
) -> None:
    """Another folder would mean another identity, and a second peer beside the one that was meant."""
    belongs(home / "run-2", f"spes-p2p:{TWO}")
    belongs(tmp_path / "node", f"spes-p2p:{ONE}")
    (tmp_path / "new").mkdir()
    folders.remember(tmp_path / "new", f"spes-p2p:{ONE}")
    (home / "last").write_text(str(tmp_path / "node"))
    started: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_headless", lambda config, *_, **__: started.append(config.data_dir) or 0)
    assert cli.run(["join", "--gpu", "none", "--headless", "--bootstrap", ENTRY, *arguments]) == 0
    assert started == [tmp_path / folder]


def test_run_is_found_by_the_beginning_of_its_id(home: Path) -> None:
    folders.remember(home / "default", f"spes-p2p:{ONE}")
    folders.remember(home / "other", f"spes-p2p:{TWO},bootstrap=x")
    assert folders.find_folder(None, "2e2e") == home / "other"
    assert folders.find_folder(None, f"spes-p2p:{ONE},invite=abc") == home / "default"
    assert find_link(Choices(run="1f1f")).run.hex() == ONE


def test_ambiguous_and_unknown_runs_are_refused(home: Path) -> None:
    folders.remember(home / "a", f"spes-p2p:{ONE}")
    folders.remember(home / "b", f"spes-p2p:1f{TWO[2:]}")
    with pytest.raises(UsageError, match="more than one run"):
        folders.find_folder(None, "1f")
    with pytest.raises(UsageError, match="has not joined such a run"):
        folders.find_folder(None, "99")


def test_run_may_be_a_whole_link() -> None:
    assert find_link(Choices(run=f"spes-p2p:{ONE}")).run.hex() == ONE


def test_folder_with_a_link_needs_no_other(tmp_path: Path) -> None:
    folders.remember(tmp_path / "node", f"spes-p2p:{ONE}")
    folders.remember(tmp_path / "later", f"spes-p2p:{TWO}")
    assert find_link(Choices(data_dir=tmp_path / "node")).run.hex() == ONE


def test_damaged_link_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").write_text("spes-p2p:12")
    with pytest.raises(LinkError, match=str(tmp_path / "link")):
        find_link(Choices(data_dir=tmp_path))
    (tmp_path / "link").write_bytes(b"\xff\xff")
    with pytest.raises(LocalStateError, match="cannot be read"):
        folders.saved_link(tmp_path)
