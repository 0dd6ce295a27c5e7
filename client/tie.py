"""Ties this process to the one that started it, so that neither a crash nor a SIGKILL of that one leaves it behind."""

from __future__ import annotations

import os
import signal
import sys
import threading

CHUNK_BYTES = 4096


def tie_to_parent() -> None:
    """Send this process SIGTERM when standard input, a pipe whose other end the parent holds, comes to its end."""
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(),), name="tie to parent", daemon=True).start()


def _wait_for_end(descriptor: int) -> None:
    # a thread, because it works whatever event loop or none the process runs
    while os.read(descriptor, CHUNK_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
