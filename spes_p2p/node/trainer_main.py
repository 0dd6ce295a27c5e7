"""The trainer process: `python -m spes_p2p.node.trainer_main --parent PID`, started by `node.worker.Worker` alone.

It reads requests from its standard input and writes replies to what was its standard output; anything that libraries
print goes to standard error. It never outlives the node: the kernel kills it when the node dies (Linux), and it ends
when its input does (everywhere).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spes_p2p.errors import SpesError, TrainerError
from spes_p2p.node.worker_messages import (
    LENGTH_BYTES,
    Done,
    Failed,
    Hello,
    Reply,
    ReplyEnvelope,
    Request,
    RequestEnvelope,
    SetShare,
    Shutdown,
    StopTraining,
    frame_length,
    read_request,
    to_frame,
)

if TYPE_CHECKING:
    from spes_p2p.node.trainer_service import TrainerService

PR_SET_PDEATHSIG = 1
NICENESS = 5
"""The node's network, and the volunteer's other programs, go first."""


class Pipes:
    """Requests in, replies out. A thread reads, so that StopTraining and the node's end are seen during training."""

    def __init__(self) -> None:
        self._in_fd = os.dup(0)
        self._out_fd = os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[RequestEnvelope] = queue.SimpleQueue()
        self._stopped_through = -1
        """Every Train up to this number is to stop."""
        self._shutdown = threading.Event()
        self.share = 1.0
        """Of the time that training may take."""

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read_all, name="requests", daemon=True).start()

    def next(self) -> RequestEnvelope:
        """Wait for the next request."""
        return self._requests.get()

    def should_stop(self, number: int) -> bool:
        """Whether the Train of this number is to stop."""
        return self._shutdown.is_set() or number <= self._stopped_through

    def reply(self, number: int, body: Reply) -> None:
        """Write one reply; ends the process if nobody listens any more."""
        rest = memoryview(to_frame(ReplyEnvelope(number, body)))
        try:
            while rest:
                rest = rest[os.write(self._out_fd, rest) :]
        except BrokenPipeError:
            os._exit(0)

    def _read_all(self) -> None:
        for payload in read_frames(self._in_fd):
            envelope = read_request(payload)
            if isinstance(envelope.body, StopTraining):
                self._stopped_through = max(self._stopped_through, envelope.number)
                continue
            if isinstance(envelope.body, SetShare | Hello):
                self.share = envelope.body.share
            if isinstance(envelope.body, SetShare):
                continue
            if isinstance(envelope.body, Shutdown):
                self._shutdown.set()
            self._requests.put(envelope)


def read_frames(in_fd: int) -> Iterator[bytes]:
    """The payloads of the frames that arrive, for ever. Ends the process when the other side is gone."""
    while True:
        yield _read(in_fd, frame_length(_read(in_fd, LENGTH_BYTES)))


def _read(in_fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(in_fd, size - len(data))
        if not piece:
            os._exit(0)  # whoever asks has gone; the last checkpoint is what counts
        data += piece
    return data


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. On other systems than Linux the end of the input does it.

    The signal is tied to the thread that started this process: the node's event loop runs in its main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the kernel was told


def serve(pipes: Pipes) -> None:
    """Answer requests until Shutdown. What is not foreseen ends the process: the node starts another."""
    service: TrainerService | None = None
    while True:
        envelope = pipes.next()
        number, request = envelope.number, envelope.body
        if isinstance(request, Shutdown):
            if service is not None:
                service.close()
            pipes.reply(number, Done())
            return
        try:
            if isinstance(request, Hello):
                # PyTorch takes seconds to load: only after the pipes are safe and the parent is watched
                from spes_p2p.node.trainer_service import TrainerService

                service = TrainerService(request)
                reply: Reply = service.ready
            elif service is None:
                raise TrainerError("the first request must be Hello")
            else:
                reply = answer(service, pipes, number, request)
        except SpesError as error:
            reply = Failed(kind=type(error).__name__, message=str(error))
        except (RuntimeError, MemoryError) as error:
            reply = out_of_memory(error)
        pipes.reply(number, reply)


def out_of_memory(error: RuntimeError | MemoryError) -> Failed:
    """The reply where memory ran out and the trainer could not help itself: another process would have no more of
    it. Raises any other error again."""
    from spes_p2p.training.out_of_memory import is_out_of_memory, memory_error

    if not is_out_of_memory(error):
        raise error
    told = memory_error("this model", error)
    return Failed(kind=type(told).__name__, message=str(told))


def answer(service: TrainerService, pipes: Pipes, number: int, request: Request) -> Reply:
    """One request to a trainer that is ready."""
    return service.handle(
        request,
        should_stop=lambda: pipes.should_stop(number),
        on_progress=lambda progress: pipes.reply(number, progress),
        share=lambda: pipes.share,
    )


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="Trainer process of a spes-p2p node; not for use by hand.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the node")
    die_with_parent(parser.parse_args().parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    pipes = Pipes()
    pipes.start()
    serve(pipes)
    os._exit(0)  # everything is stored; tearing PyTorch down would take a second


if __name__ == "__main__":
    main()
