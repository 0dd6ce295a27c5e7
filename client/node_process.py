"""A node in a process of its own, for the terminal UI: `python -m spes_p2p.client.node_process`.

The parent writes one line of JSON (`Order`) to standard input, so that no secret shows in the process list, and keeps
the pipe open: its end, however the parent died, ends the node, unless the parent let go of it before (`detach`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from spes_p2p.client.foreground import run_in_foreground
from spes_p2p.client.logs import set_up
from spes_p2p.client.output import complain
from spes_p2p.client.tie import LET_GO, tie_to_parent
from spes_p2p.config import NodeConfig
from spes_p2p.ending import end_process
from spes_p2p.errors import SpesError
from spes_p2p.network.link import parse_link

MAX_WORDS_LINES = 10
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d \[")
END_S = 20.0
"""A node that was told to end and has not ended after this is killed."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent asks for."""

    config: str
    """NodeConfig as JSON."""
    link: str
    invite_hex: str
    """The invite key, which the JSON cannot carry as bytes; empty: none."""


class NodeProcess:
    """The parent's side: a node that runs while this object is open, and not longer."""

    def __init__(self, config: NodeConfig, link: str, log_file: Path) -> None:
        seed = config.invite_seed
        order = Order(
            config=config.model_copy(update={"invite_seed": None}).model_dump_json(),
            link=link,
            invite_hex=seed.hex() if seed else "",
        )
        with log_file.open("ab") as log:
            self._start_of_log = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spes_p2p.client.node_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # a session of its own: Ctrl-C of the terminal is the UI's to interpret
                start_new_session=True,
            )
        self._log_file = log_file
        self.is_detached = False
        """It goes on without this process."""
        if self._process.stdin is not None:
            # a child that died at once is found by `exit_code`
            with suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id of the node."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """How the node ended; None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """What the node said at the end of this start; see `end_of_log`."""
        with self._log_file.open("rb") as log:
            log.seek(self._start_of_log)
            text = log.read().decode(errors="replace")
        return end_of_log(text, self._process.poll())

    def detach(self) -> bool:
        """Let the node go on when this process ends. False: it has ended already, and `exit_code` says how."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.write(LET_GO)
                self._process.stdin.flush()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self.is_detached = self._process.poll() is None
        return self.is_detached

    def close(self) -> int:
        """End the node if it still runs, and return its exit code; one that is detached goes on, and the code is 0."""
        if self.is_detached:
            return 0
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def end_of_log(text: str, exit_code: int | None) -> str:
    """What a node complained about when it ended: the lines after its log lines, at most ten; else its last two lines.

    A node that was killed by a signal (a negative exit code) says nothing itself: then this names the signal.
    """
    lines = text.splitlines()
    begin = max((number + 1 for number, line in enumerate(lines) if LOG_LINE.match(line)), default=0)
    complaint = lines[begin:]
    if exit_code is not None and exit_code < 0 and not complaint:
        return f"the node was killed ({signal.Signals(-exit_code).name}); join again and it goes on where it was"
    return "\n".join(complaint[-MAX_WORDS_LINES:] or lines[-2:])


def main() -> int:
    """The child's side."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # byte by byte: a buffer could swallow the end of the input, which is waited for later
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            return 2
        line += byte
    order = msgspec.json.decode(bytes(line), type=Order)
    config = NodeConfig.model_validate_json(order.config)
    if order.invite_hex:
        config = config.model_copy(update={"invite_seed": bytes.fromhex(order.invite_hex)})
    tie_to_parent()
    try:
        return run_in_foreground(config, parse_link(order.link), set_up(as_json=False))
    except SpesError as error:
        complain(str(error))
        return error.exit_code


if __name__ == "__main__":
    end_process(main())
