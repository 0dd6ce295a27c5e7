"""One node per data folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.errors import IdentityError
from spes_p2p.storage.lock import LOCK_NAME, FolderLock

HOLDER = """
import sys
from pathlib import Path
from spes_p2p.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_pid_and_the_folder_of_the_first(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(IdentityError) as caught:
        FolderLock(tmp_path)
    assert f"identity in use: process {os.getpid()} already runs with {tmp_path}" in str(caught.value)
    assert caught.value.exit_code == 6


def test_closing_lets_the_next_one_in(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.close()
    lock.close()
    with FolderLock(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_a_killed_holder_leaves_nothing_locked(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityError, match=f"process {holder.pid} "):
            FolderLock(tmp_path)
        holder.kill()
    FolderLock(tmp_path).close()


def test_a_child_started_by_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "print('runs', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"
        lock.close()
        FolderLock(tmp_path).close()
        child.communicate(b"\n")


def test_the_folder_is_made_if_it_is_missing(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new" / "data") as lock:
        assert lock.folder.is_dir()
