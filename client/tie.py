"""Ties this process to the one that started it, so that neither a crash nor a SIGKILL of that one leaves it behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

CHUNK_BYTES = 4096
LET_GO = b"let go\n"
"""What the parent writes last, if this process shall go on without it."""
LOOK_EVERY_S = 0.5


def tie_to_parent() -> None:
    """Send this process SIGTERM when standard input, a pipe whose other end the parent holds, comes to its end, unless
    the parent has let go before."""
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(),), name="tie to parent", daemon=True).start()


def end_with_parent(parent_pid: int) -> None:
    """End this process at once when its parent has ended; for one whose standard input somebody else reads."""
    threading.Thread(target=_watch_parent, args=(parent_pid,), name="end with parent", daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_EVERY_S)
    os._exit(0)


def _wait_for_end(descriptor: int) -> None:
    # a thread, because it works whatever event loop or none the process runs
    said = b""
    while chunk := os.read(descriptor, CHUNK_BYTES):
        said = (said + chunk)[-len(LET_GO) :]
    if said != LET_GO:
        os.kill(os.getpid(), signal.SIGTERM)
