"""A private folder for the two unix sockets between a node and its daemon.

It is short-lived and its path must be short (unix sockets allow about 100 bytes), so it is not in the data folder. A
process that was killed leaves its folder behind; the next start sweeps those whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "spes-p2p-"
_SWEEP_AFTER_S = 60
"""A folder younger than this may belong to a process that is about to lock it."""


class SocketFolder:
    """A folder with mode 0700, locked as long as this object is open."""

    def __init__(self, root: Path | None = None) -> None:
        """Below `root`, the system's temporary folder unless given."""
        root = root or Path(tempfile.gettempdir())
        sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = _try_lock(self.path)

    def close(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep(root: Path) -> None:
    """Remove this user's abandoned folders below `root`."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue  # its owner, or another sweeper, was faster
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AFTER_S:
            continue
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """The open descriptor of the folder's lock, or None if another process holds it or the folder has gone."""
    try:
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
