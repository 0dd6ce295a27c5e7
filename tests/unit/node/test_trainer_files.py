from pathlib import Path

import pytest

from spes_p2p.errors import LocalStateError
from spes_p2p.node.trainer_files import CheckpointFiles


def saved(folder: Path, *states: bytes) -> CheckpointFiles:
    files = CheckpointFiles(folder)
    for state in states:
        assert files.save(len(state), [state[:1], state[1:]]) == state
    return files


def states(files: CheckpointFiles) -> list[bytes | None]:
    """From the newest; None: damaged."""
    return [None if isinstance(state, LocalStateError) else bytes(state) for _, state in files.load()]


def test_two_generations_are_kept_newest_first(tmp_path):
    assert states(saved(tmp_path / "new", b"one", b"two", b"three")) == [b"three", b"two"]
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_numbers_go_on_after_a_restart(tmp_path):
    saved(tmp_path, b"one", b"two")
    assert states(saved(tmp_path, b"three")) == [b"three", b"two"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_generation_is_found_and_the_one_before_is_used(tmp_path, damage):
    files = saved(tmp_path, b"one" * 100, b"two" * 100)
    newest = max(tmp_path.iterdir())
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[150] ^= 1
    newest.write_bytes({"truncate": data[:-1], "flip": data, "empty": b""}[damage])
    assert states(files) == [None, b"one" * 100]


def test_a_crash_while_writing_leaves_the_generation_before(tmp_path):
    saved(tmp_path, b"one")
    (tmp_path / ".spes-tmp-0123").write_bytes(b"half")
    assert states(CheckpointFiles(tmp_path)) == [b"one"]
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-00000001.checkpoint"]
