"""The process of one more rank: `python -m spes_p2p.node.rank_main --parent PID`, started by the trainer process alone.

It holds its share of model and optimizer and does what the trainer tells it through its standard input. It has no
files, no text and no network, and never outlives the trainer: the kernel kills it when that dies (Linux), and it ends
when its input does (everywhere). Why it failed, if it does, is all that it ever writes to its standard output.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from spes_p2p.node.rank_messages import Join, Message, read_message
from spes_p2p.node.trainer_main import die_with_parent, read_frames

FAILED = 1


class Inbox:
    """Messages in order. A thread reads, so that the trainer's end is seen at any time."""

    def __init__(self) -> None:
        self._in_fd = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read_all, name="messages", daemon=True).start()

    def next(self) -> Message:
        """Wait for the next one."""
        return self._messages.get()

    def _read_all(self) -> None:
        for payload in read_frames(self._in_fd):
            self._messages.put(read_message(payload))


def serve(inbox: Inbox) -> None:
    """Join, and follow orders until the process is ended."""
    join = inbox.next()
    if not isinstance(join, Join):
        raise TypeError("the first message must be Join")
    # PyTorch takes seconds to load: only after the pipe is safe and the parent is watched
    import torch

    from spes_p2p.node.ranks import meet
    from spes_p2p.training.orders import Order
    from spes_p2p.training.out_of_memory import limit_memory
    from spes_p2p.training.spread import RankFailure, follow

    def next_order() -> Order:
        message = inbox.next()
        if isinstance(message, Join):
            raise RankFailure("this rank has joined already")
        return message

    torch.set_num_threads(join.threads)
    if join.memory_bytes is not None:
        limit_memory(torch.device(join.device), join.memory_bytes)
    follow(meet(join.index, join.count, join.device, Path(join.meeting_place)), next_order)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="One GPU's process of a spes-p2p trainer; not for use by hand.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    die_with_parent(parser.parse_args().parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reason_fd = os.dup(1)
    os.dup2(2, 1)  # libraries print where they like

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        os.write(reason_fd, f"{kind.__name__}: {error}".encode())
        os._exit(FAILED)  # tearing PyTorch down may wait for the other ranks

    sys.excepthook = fail
    serve(Inbox())


if __name__ == "__main__":
    main()
