"""Locks between processes: a plain exclusive lock, and the one that lets a data folder have a single node.

Both are `flock` on a file of their own, so that the kernel releases them however their holder ends. The lock files
stay: deleting one would let two processes lock two different files of the same name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_p2p.errors import IdentityError
from spes_p2p.storage.atomic import disk_errors, make_folder

LOCK_NAME = "node.lock"


def _open_lock_file(path: Path) -> int:
    with disk_errors(path.parent):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path` alone, waiting for other threads and processes that hold it.

    The folder must exist. Not re-entrant: a thread that holds it and asks again waits for ever.
    """
    fd = _open_lock_file(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class FolderLock:
    """One node per data folder. Held from construction until `close`, or until the process ends.

    Raises IdentityError that names the folder and the holder's process id if another node holds it. A child that is
    started with exec does not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._folder = folder
        self._fd: int | None = _open_lock_file(folder / LOCK_NAME)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            self.close()
            who = f"process {holder}" if holder else "another process"
            raise IdentityError(
                f"identity in use: {who} already runs with {folder}\n"
                "Stop that one first, or give this one a data folder of its own."
            ) from error
        with disk_errors(folder):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def folder(self) -> Path:
        """The folder that this lock guards."""
        return self._folder

    def close(self) -> None:
        """Let the folder go; harmless when repeated."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_holder(folder: Path) -> str | None:
    """The process id, as text, of the node that holds a folder's lock (empty: it has not written it yet); None if no
    node does. Changes nothing, and makes neither folder nor file. Raises MachineError if the disk refuses."""
    with disk_errors(folder):
        try:
            fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        finally:
            os.close(fd)
    return None
