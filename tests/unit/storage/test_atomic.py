"""Whole files or none, and what a crash or a full disk leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from spes_p2p.errors import MachineError
from spes_p2p.storage import atomic
from spes_p2p.storage.atomic import TEMP_PREFIX, make_folder, remove_leftovers, temp_file, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_with(number: int) -> object:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_written_file_holds_the_bytes_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"first")
    write_file(tmp_path / "a", memoryview(b"second"))
    assert (tmp_path / "a").read_bytes() == b"second"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert names(tmp_path) == ["a"]


def test_without_replace_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"second", replace=False)
    assert (tmp_path / "a").read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


def test_content_is_synced_before_the_name_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        events.append("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        real_fsync(fd)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(atomic, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    write_file(tmp_path / "a", b"x")
    assert events == ["fsync file", "rename", "fsync folder"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    write_file(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_keeps_the_last_good_file_and_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_file(tmp_path / "a", b"good")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail_with(errno.ENOSPC))
        with pytest.raises(MachineError) as caught:
            write_file(tmp_path / "a", b"new")
    assert str(tmp_path) in str(caught.value)
    assert "disk full" in str(caught.value)
    assert "Free some space" in str(caught.value)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"good"
    write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EDQUOT, "disk full"), (errno.EROFS, "no access"), (errno.EACCES, "no access"), (errno.EIO, "disk failed")],
)
def test_each_disk_trouble_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    monkeypatch.setattr(os, "write", fail_with(number))
    with pytest.raises(MachineError, match=words):
        write_file(tmp_path / "a", b"x")


def test_what_a_crash_left_before_the_rename_is_removed_and_the_old_file_stays(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"good")
    (tmp_path / f"{TEMP_PREFIX}0011").write_bytes(b"half")
    assert remove_leftovers(tmp_path) == 1
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"good"


def test_the_temporary_file_of_a_living_writer_is_not_removed(tmp_path: Path) -> None:
    with temp_file(tmp_path) as temp:
        temp.write(b"still writing")
        assert remove_leftovers(tmp_path) == 0
        temp.rename(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"still writing"


def test_a_clean_up_between_creation_and_lock_costs_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_flock, num_calls = fcntl.flock, 0

    def flock(fd: int, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            next(tmp_path.iterdir()).unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_file(tmp_path / "a", b"x")
    assert num_calls == 2
    assert (tmp_path / "a").read_bytes() == b"x"


def test_a_missing_folder_has_no_leftovers(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "none") == 0


def test_folders_are_made_for_their_owner_alone_and_existing_ones_stay_as_they_are(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir(mode=0o755)
    outer.chmod(0o755)
    make_folder(outer / "a" / "b")
    make_folder(outer / "a" / "b")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (outer, outer / "a", outer / "a" / "b")] == [
        0o755,
        0o700,
        0o700,
    ]


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError, match="file is a file where a folder is needed"):
        make_folder(tmp_path / "file" / "inner")


def test_a_folder_that_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be made"):
        make_folder(tmp_path / ("x" * 300) / "inner")
