"""Files that are either whole or not there: temporary file, fsync, rename, fsync of the folder.

A temporary file is locked while its writer lives, so that a later start can tell what a crash left behind from what
another process is writing at this moment, without trusting process ids.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spes_p2p.digests import Bytes
from spes_p2p.errors import MachineError

TEMP_PREFIX = ".spes-tmp-"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the disk says into MachineError that names the folder and what to do.

    Covers a full disk or quota, missing permission, a read-only or failing disk. Every other OSError (such as a missing
    file) passes through: it is for the caller to judge.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = (
                f"disk full: cannot write in {folder}\nFree some space there; it goes on from the last good state."
            )
        elif error.errno in _REFUSED:
            message = f"no access to {folder}: {error.strerror}\nMake it writable for this user, or use another folder."
        elif error.errno == errno.EIO:
            message = f"the disk failed at {folder}: {error.strerror}\nCheck the disk (dmesg), or use another folder."
        else:
            raise
        raise MachineError(message) from error


def fsync(fd: int) -> None:
    """Bring a file's bytes to the medium itself; on macOS plain fsync stops at the drive's cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably, for this user alone (0700). An existing one stays as it is.

    Raises MachineError if the disk is full or refuses, if a file is in the way, or if there can be no such folder.
    """
    try:
        _make_missing(folder)
    except OSError as error:
        # such as a name that is too long, or a file system without folders of one's own
        raise MachineError(f"{folder} cannot be made: {error.strerror}\nUse another folder.") from error


def _make_missing(folder: Path) -> None:
    missing = []
    at = folder
    with disk_errors(folder):
        while not at.exists():
            missing.append(at)
            at = at.parent
    if not at.is_dir():
        raise MachineError(f"{at} is a file where a folder is needed\nMove it away, or use another folder.")
    for new in reversed(missing):
        with disk_errors(new.parent):
            new.mkdir(mode=0o700, exist_ok=True)
            fsync_folder(new.parent)


def write_all(fd: int, data: Bytes) -> None:
    """Write all of `data` at the file's position, however many calls the system needs."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(fd, rest) :]


class TempFile:
    """A file under a temporary name; made by `temp_file`."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        write_all(self.fd, data)

    def sync(self) -> None:
        """Make the content durable, still under the temporary name."""
        fsync(self.fd)

    def rename(self, target: Path) -> None:
        """Give it its name, replacing what had it. Durable after `fsync_folder` only."""
        self.path.rename(target)

    def link(self, target: Path) -> None:
        """Give it its name if that is free. Raises FileExistsError otherwise."""
        os.link(self.path, target)


@contextmanager
def temp_file(folder: Path) -> Iterator[TempFile]:
    """A new file in `folder`, mode 0600. What has not been renamed by the end of the block is deleted.

    The block's disk errors become MachineError.
    """
    with disk_errors(folder):
        temp = _create_locked(folder)
        try:
            yield temp
        finally:
            with suppress(FileNotFoundError):
                temp.path.unlink()
            os.close(temp.fd)


def _create_locked(folder: Path) -> TempFile:
    while True:
        path = folder / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        # a clean-up in another process may have come between creation and lock
        if os.fstat(fd).st_nlink == 1:
            return TempFile(fd, path)
        os.close(fd)


def write_file(path: Path, data: Bytes, *, replace: bool = True) -> None:
    """Write a whole file durably, mode 0600: readers see all of it or what was there before.

    With `replace=False` an existing file is left alone and FileExistsError raised. Raises MachineError when the disk is
    full or refuses.
    """
    with temp_file(path.parent) as temp:
        temp.write(data)
        temp.sync()
        if replace:
            temp.rename(path)
        else:
            temp.link(path)
        fsync_folder(path.parent)


def remove_leftovers(folder: Path) -> int:
    """Delete the temporary files of processes that no longer live; returns how many. A missing folder has none."""
    num_removed = 0
    if not folder.is_dir():
        return 0
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            num_removed += 1
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(fd)
    return num_removed
