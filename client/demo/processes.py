"""Processes of the demo: started so that they cannot outlive it, ended, and looked for afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from spes_p2p.errors import EXIT_INTERRUPTED, SpesError

END_S = 15.0
"""A process that was asked to end and has not after this is killed."""
GONE_S = 5.0
"""How long children may take to follow their parents."""


def child_environment(home: Path) -> dict[str, str]:
    """This process's environment with one thread per process, apart from this user's choices and last run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPES_")}
    return kept | {"SPES_HOME": str(home), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def output_of(module: str, arguments: Sequence[str], home: Path) -> str:
    """What `python -m module` prints, run to its end with `home` as SPES_HOME. Raises SpesError with its complaint."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        env=child_environment(home),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        what = f"`python -m {module} {arguments[0]}`"
        raise _passed_on(f"{what} ended with exit code {done.returncode}: {done.stderr.strip()}", done.returncode)
    return done.stdout


def _passed_on(message: str, exit_code: int) -> SpesError:
    """The error of a child, whose exit code says what kind of trouble it is: the demo ends with the same."""
    error = SpesError(message)
    if exit_code > 0:
        error.exit_code = exit_code
    return error


class Child:
    """One command of `spes-p2p` in a process of its own, with its output in a file."""

    def __init__(self, name: str, arguments: Sequence[str], output: Path, within: Sequence[str] = ()) -> None:
        """`within`: a command that becomes the one that is appended to it, such as `ip netns exec NAME`."""
        self.name = name
        self.output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", "spes_p2p.client", *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(output.parent),
                # Ctrl-C in the terminal is the demo's to pass on
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise SpesError with its last words if it has ended."""
        code = self._process.poll()
        if code is not None:
            message = f"{self.name} ended with exit code {code}: {self.last_line()}\nAll of it: {self.output}"
            raise _passed_on(message, code)

    def check_end(self) -> None:
        """Raise SpesError unless it ended well, or because it was told to (a signal may overtake the local API)."""
        code = self._process.poll()
        if code not in (0, EXIT_INTERRUPTED):
            message = f"{self.name} ended badly, exit code {code}: {self.last_line()}\nAll of it: {self.output}"
            raise _passed_on(message, code or SpesError.exit_code)

    def last_line(self) -> str:
        """The end of what it printed."""
        lines = self.output.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "(nothing was printed)")

    def ask_to_end(self) -> None:
        """SIGTERM, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_or_kill(self, until_s: float) -> None:
        """Wait for its end until that moment of the monotonic clock, then kill it."""
        try:
            self._process.wait(max(until_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@dataclass(slots=True)
class Leftovers:
    """What the demo's processes held while they ran, to be looked for when they have ended."""

    processes: dict[int, psutil.Process] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)
    socket_files: set[Path] = field(default_factory=set)

    def note(self, children: Iterable[Child]) -> None:
        """Remember the children's processes, theirs, and what these listen on."""
        for child in children:
            try:
                parent = psutil.Process(child.pid)
                family = [parent, *parent.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                self.processes[process.pid] = process
                self._note_sockets(process)

    def _note_sockets(self, process: psutil.Process) -> None:
        try:
            tcp = process.net_connections(kind="tcp")
            unix = process.net_connections(kind="unix")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            # it has just ended, or the system shows sockets to root only
            return
        self.ports |= {connection.laddr.port for connection in tcp if connection.status == psutil.CONN_LISTEN}
        names = {str(connection.laddr) for connection in unix}
        self.socket_files |= {Path(name) for name in names if name.startswith("/")}

    def check_gone(self) -> None:
        """Wait a moment for all of it to go. Raises SpesError that names what is left."""
        _, alive = psutil.wait_procs(list(self.processes.values()), timeout=GONE_S)
        left = [f"process {process.pid} ({process.name()})" for process in alive]
        left += [f"port {port}" for port in sorted(self.ports) if _has_listener(port)]
        left += [f"socket {path}" for path in sorted(self.socket_files) if path.is_socket()]
        if left:
            raise SpesError(f"the demo has ended, and this is still there: {', '.join(left)}")


def _has_listener(port: int) -> bool:
    """Whether somebody listens; not whether one can bind, which connections of the past may bar for a minute."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(GONE_S)
        return probe.connect_ex(("127.0.0.1", port)) == 0
