"""The ways to start a node: in this process, behind the terminal UI, or in the background."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.client.output import complain, say
from spes_p2p.config import NodeConfig
from spes_p2p.errors import EXIT_INTERRUPTED, LocalStateError, SpesError, UnreachableError
from spes_p2p.network.link import InviteLink, format_link
from spes_p2p.node.control_client import request_stop, running_pid
from spes_p2p.node.files import LOG_FILE
from spes_p2p.storage.logfile import LogFile, one_line

if TYPE_CHECKING:
    from spes_p2p.client.node_process import NodeProcess  # it brings the local API's server along

EXIT_KILLED = 1
_LOOK_EVERY_S = 0.1


def run_headless(config: NodeConfig, invite: InviteLink, *, as_json: bool, file: LogFile | None) -> int:
    """A node in this process, with log lines. Returns the exit code; raises SpesError, which is in the log too where
    that is for programs, or for somebody who does not see this terminal."""
    from spes_p2p.client.foreground import run_in_foreground
    from spes_p2p.client.logs import set_up

    log = set_up(as_json=as_json, file=file)
    try:
        return run_in_foreground(config, invite, log)
    except SpesError as error:
        if as_json or file is not None:
            log.error(one_line(error))
        raise


def run_with_ui(config: NodeConfig, invite: InviteLink) -> int:
    """A node in a process of its own behind the terminal UI. It ends with the UI, unless the user detaches it."""
    from spes_p2p.client.ui.app import SwarmApp
    from spes_p2p.client.ui.feed import ControlFeed

    process, log_file = _start(config, invite)
    feed = ControlFeed(config.data_dir, pid=process.pid, exit_code=process.exit_code)
    app = SwarmApp([feed], can_detach=True)
    try:
        with _ended_by_sigterm(app.end_from_thread):
            answer = app.run()
        if answer == "detach" and process.detach():
            _tell_of(process, config.data_dir, log_file)
            return 0
        if answer == "stop":
            _take_back_leave(config.data_dir, process.pid)
    finally:
        if process.exit_code() is None and not process.is_detached:
            complain("ending the node")
        exit_code = process.close()
    return _told_end(process, exit_code, log_file)


def run_in_background(config: NodeConfig, invite: InviteLink) -> int:
    """Start a node that outlives this process; returns once its local API answers, or with its exit code."""
    process, log_file = _start(config, invite)
    pause = threading.Event()
    try:
        complain("starting the node: looking for somebody who knows the run")
        while process.exit_code() is None and running_pid(config.data_dir) != process.pid:
            pause.wait(_LOOK_EVERY_S)
        if process.detach():
            _tell_of(process, config.data_dir, log_file)
            return 0
    finally:
        exit_code = process.close()
    return _told_end(process, exit_code, log_file)


def _start(config: NodeConfig, invite: InviteLink) -> tuple[NodeProcess, Path]:
    from spes_p2p.client.node_process import NodeProcess
    from spes_p2p.storage.atomic import make_folder

    make_folder(config.data_dir)
    log_file = config.data_dir / LOG_FILE
    return NodeProcess(config, format_link(invite), log_file), log_file


def _tell_of(process: NodeProcess, data_dir: Path, log_file: Path) -> None:
    say(f"the node goes on in the background (process {process.pid})")
    say(f"`spes-p2p attach --data-dir {data_dir}` shows it, `spes-p2p leave --data-dir {data_dir}` ends it")
    say(f"its log: {log_file}")


def _told_end(process: NodeProcess, exit_code: int, log_file: Path) -> int:
    """Say how the node ended; returns the exit code of the command."""
    if exit_code not in (0, EXIT_INTERRUPTED):
        complain(process.last_words())
        complain(f"(all of it: {log_file})")
    elif exit_code == 0:
        complain("left the run")
    # a signal's number is no exit code of ours
    return exit_code if exit_code >= 0 else EXIT_KILLED


def _take_back_leave(data_dir: Path, pid: int) -> None:
    """The user wants an end at once: a leave that was asked for before does not wait for the next start."""
    if running_pid(data_dir) == pid:
        with suppress(UnreachableError, LocalStateError):
            request_stop(data_dir)


@contextmanager
def _ended_by_sigterm(end: Callable[[], None]) -> Iterator[None]:
    """SIGTERM ends the UI as a key would, so that the terminal is left as it was found.

    The end of the terminal (SIGHUP) needs no such care: it ends this process, and with it the pipe that keeps the node.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: end())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_terminal() -> bool:
    """Whether a person sits in front of both ends of this process."""
    return sys.stdin.isatty() and sys.stdout.isatty()
