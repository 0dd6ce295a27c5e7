"""`Worker`: the node's side of its trainer process. Starts it, talks to it, and starts it again when it dies.

Requests are answered one at a time. If the process dies during one, the worker waits a little (longer each time),
starts another, which resumes from its checkpoint, brings it to where it was (Hello, the last LoadStart), and asks
again. Publish is not asked again: what was trained died with the process. After three deaths in one request, the
request fails with TrainerError.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec

from spes_p2p import errors
from spes_p2p.errors import SpesError, TrainerError
from spes_p2p.ids import Digest
from spes_p2p.node.worker_messages import (
    LENGTH_BYTES,
    ExportHandover,
    Failed,
    HandoverExported,
    HandoverImported,
    Hello,
    ImportHandover,
    LoadStart,
    Progress,
    Publish,
    Published,
    Ready,
    Reply,
    Request,
    RequestEnvelope,
    SetShare,
    Shutdown,
    Started,
    StopTraining,
    Train,
    Trained,
    frame_length,
    read_reply,
    to_frame,
)
from spes_p2p.storage.atomic import make_folder

MAX_ATTEMPTS = 3
"""How often one request is tried before it fails."""
CLOSE_TIMEOUT_S = 2.0
"""For a request under way when the process shall end: of a node nothing is left after three seconds."""
MAX_LOG_BYTES = 1 << 20
LOG_NAME = "trainer.log"
TRAINER_COMMAND = (sys.executable, "-m", "spes_p2p.node.trainer_main")

ReplyType = TypeVar("ReplyType")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long to wait before a process is started again."""

    first_ms: int = 500
    most_ms: int = 30_000

    def delay_ms(self, attempt: int) -> int:
        """Before attempt 2, 3, ...: doubling."""
        return int(min(self.first_ms * 2 ** (attempt - 2), self.most_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """The trainer process died and will be started again."""

    reason: str
    restarts: int
    """How often that has happened since the node started, this time included."""


class WorkerListener(Protocol):
    """Who watches a worker. Called in the event loop; must not block."""

    def progress(self, progress: Progress) -> None:
        """Training has moved on."""
        ...

    def restarting(self, event: Restarting) -> None:
        """The process died."""
        ...


class _DiedError(Exception):
    """The trainer process ended, with the reason as far as it is known."""


class Worker:
    """One trainer process, supervised. Belongs to one event loop, which must run in the main thread."""

    def __init__(
        self,
        hello: Hello,
        listener: WorkerListener,
        back_off: BackOff | None = None,
        command: Sequence[str] = TRAINER_COMMAND,
    ) -> None:
        self._command = command
        self._hello = hello
        self._listener = listener
        self._back_off = back_off or BackOff()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._next_number = 0
        self._waiting: tuple[int, asyncio.Future[Reply]] | None = None
        self._last_start: LoadStart | None = None
        self._training: int | None = None
        """Number of the Train under way; it stays the same over restarts."""
        self._stop_wanted = False
        self._closed = False
        self._has_begun = False
        """The present process has answered Hello; before, it loads PyTorch and has nothing to finish."""
        self._last_death: str | None = None
        """Why the latest process ended, until another is started."""
        self._log_start = 0
        self.restarts = 0
        self.ready: Ready | None = None
        """The latest Ready."""

    @property
    def pid(self) -> int | None:
        """Process id of the trainer, while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    # ------------------------------------------------------------------------------------------------------- requests

    async def start(self) -> Ready:
        """Start the process and wait until it has its text. Raises DataError, MachineError, ConfigError, BlobError,
        TrainerError."""

        async def ask() -> Ready:
            await self._ensure_running(replay=True)
            return _expect(self.ready, Ready)

        async with self._lock:
            return await self._attempt(ask, retry=True)

    async def load_start(self, request: LoadStart) -> Started:
        """Load the start of a round. Raises BlobError if the store lacks a blob."""
        started = await self._request(request, Started)
        self._last_start = request
        return started

    async def train(self, num_inner_steps: int) -> Trained:
        """Make inner steps; the listener hears of progress. Ends early after `stop_training`."""
        self._stop_wanted = False
        return await self._request(Train(num_inner_steps=num_inner_steps), Trained)

    def stop_training(self) -> None:
        """Have the `train` that is being awaited end after the step it is at, also if another request comes first."""
        self._stop_wanted = True
        if self._training is not None:
            self._send(self._training, StopTraining())

    def set_share(self, share: float) -> None:
        """Have the trainer work for this share of the time, now and in processes to come."""
        if share != self._hello.share:
            self._hello = msgspec.structs.replace(self._hello, share=share)
            self._send(self._take_number(), SetShare(share=share))

    async def publish(self) -> Published:
        """Store the trained round's pieces. Raises NotFiniteError if the weights are not finite (the update is
        withheld), TrainerError if what was trained is lost."""
        return await self._request(Publish(), Published, retry=False)

    async def export_handover(self, shard: int) -> HandoverExported:
        """Store masters and moments of an owned shard as a blob."""
        return await self._request(ExportHandover(shard=shard), HandoverExported)

    async def import_handover(self, shard: int, blob: Digest) -> HandoverImported:
        """Take over a shard that the last `load_start` gave this peer."""
        return await self._request(ImportHandover(shard=shard, blob=blob), HandoverImported)

    async def close(self) -> None:
        """End the process, by force if it does not answer, and wait until it is gone. A training under way ends early;
        other requests are finished if that takes no more than `CLOSE_TIMEOUT_S`, and fail otherwise."""
        self._closed = True
        if self._process is not None and self._has_begun:
            self._send(self._take_number(), Shutdown())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        await self._end_process()

    # ---------------------------------------------------------------------------------------------------- supervision

    async def _request(self, request: Request, reply_type: type[ReplyType], *, retry: bool = True) -> ReplyType:
        async def ask() -> ReplyType:
            await self._ensure_running(replay=not isinstance(request, LoadStart))
            return _expect(await self._exchange(number, request), reply_type)

        async with self._lock:
            number = self._take_number()
            self._training = number if isinstance(request, Train) else None
            try:
                return await self._attempt(ask, retry)
            finally:
                self._training = None

    async def _attempt(self, ask: Callable[[], Awaitable[ReplyType]], retry: bool) -> ReplyType:
        attempt = 1
        while True:
            try:
                return await ask()
            except _DiedError as death:
                await self._end_process()
                if self._closed:
                    raise TrainerError("the trainer was stopped") from death
                if attempt == MAX_ATTEMPTS or not retry:
                    raise TrainerError(f"the trainer process died: {death}\nIts log: {self._log_path}") from death
                attempt += 1
                await asyncio.sleep(self._back_off.delay_ms(attempt) / 1000)

    async def _ensure_running(self, *, replay: bool) -> None:
        """A process that has answered Hello and, with `replay`, has the last start loaded."""
        if self._closed:
            raise TrainerError("the trainer was stopped")
        if self._reader is not None and not self._reader.done():
            return
        await self._end_process()
        self._has_begun = False
        await self._spawn()
        try:
            self.ready = _expect(await self._exchange(self._take_number(), self._hello), Ready)
            self._has_begun = True
            if replay and self._last_start is not None:
                _expect(await self._exchange(self._take_number(), self._last_start), Started)
        except SpesError:
            await self._end_process()
            raise

    async def _spawn(self) -> None:
        if self._last_death is not None:
            self.restarts += 1
            self._listener.restarting(Restarting(reason=self._last_death, restarts=self.restarts))
            self._last_death = None
        threads = str(self._hello.threads)
        # these must be in place before the process loads PyTorch
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with _open_log(self._log_path) as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--parent",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the node, which decides about its trainer
            )
        self._reader = asyncio.create_task(self._read_replies(self._process), name="trainer replies")

    async def _exchange(self, number: int, request: Request) -> Reply:
        """Send a request and wait for its reply. Raises _DiedError when the process ends first."""
        if self._reader is None or self._reader.done():
            raise _DiedError(self._last_death or "it has ended")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting = (number, future)
        try:
            self._send(number, request)
            if isinstance(request, Train) and self._stop_wanted:
                self._send(number, StopTraining())
            return await future
        except asyncio.CancelledError:
            self._send(number, StopTraining())
            raise
        finally:
            self._waiting = None

    async def _read_replies(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise TrainerError("the trainer process has no output")
        nonsense = ""
        try:
            while True:
                header = await process.stdout.readexactly(LENGTH_BYTES)
                envelope = read_reply(await process.stdout.readexactly(frame_length(header)))
                self._receive(envelope.number, envelope.body)
        except asyncio.IncompleteReadError:
            pass  # the process has closed its end
        except (ValueError, msgspec.MsgspecError) as error:
            nonsense = f"it sent nonsense ({error})"
            process.kill()
        code = await process.wait()
        self._last_death = nonsense or _describe_end(code, self._log_path, self._log_start)
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(_DiedError(self._last_death))

    def _receive(self, number: int, body: Reply) -> None:
        if isinstance(body, Progress):
            if number == self._training:
                self._listener.progress(body)
        elif self._waiting is not None and self._waiting[0] == number and not self._waiting[1].done():
            self._waiting[1].set_result(body)

    def _send(self, number: int, request: Request) -> None:
        """Queue a frame; if the process is gone, its reader finds out."""
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(to_frame(RequestEnvelope(number, request)))

    async def _end_process(self) -> None:
        """Kill the process if it still runs, and wait until it and its pipes are gone."""
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if reader is not None:
            await reader
        if process.stdin is not None:
            process.stdin.close()
            with suppress(ConnectionError):
                await process.stdin.wait_closed()

    @property
    def _log_path(self) -> Path:
        return Path(self._hello.state_dir) / LOG_NAME

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number


_FAILURES: dict[str, type[SpesError]] = {
    failure.__name__: failure
    for failure in (
        errors.BlobError,
        errors.ConfigError,
        errors.DataError,
        errors.LocalStateError,
        errors.MachineError,
        errors.NotFiniteError,
        errors.SchemaError,
        errors.TrainerError,
    )
}


def _expect(reply: Reply | None, reply_type: type[ReplyType]) -> ReplyType:
    if isinstance(reply, reply_type):
        return reply
    if isinstance(reply, Failed):
        raise _FAILURES.get(reply.kind, TrainerError)(reply.message)
    raise TrainerError(f"the trainer answered {type(reply).__name__} where {reply_type.__name__} was due")


def _open_log(path: Path) -> IO[bytes]:
    """The log, at its end; begun anew when it has grown too long."""
    make_folder(path.parent)
    too_long = path.exists() and path.stat().st_size > MAX_LOG_BYTES
    return path.open("wb" if too_long else "ab")


def _describe_end(code: int, log_path: Path, log_start: int) -> str:
    """Exit code or signal, and the last line that the process wrote to its log."""
    try:
        end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        end = f"ended by signal {-code}"
    try:
        lines = log_path.read_bytes()[log_start:].decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"{end}: {lines[-1]}" if lines else end
