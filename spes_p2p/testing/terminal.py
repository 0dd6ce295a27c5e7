"""A command in a terminal of its own, as a person starts it: keys go in, the screen's bytes come out, and it can be
closed as a window or a lost ssh session closes it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from spes_p2p.errors import SpesError

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[PX^_\]].*?(\x1b\\|\x07)|[()][AB0]|.)", re.DOTALL)
_LOOK_S = 0.1


class Terminal:
    """`spes-p2p ARGUMENTS` as the leader of a session with a pseudo-terminal."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (24, 80)
    ) -> None:
        """`size`: rows and columns."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEAD, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        self._output = bytearray()
        self._stop_reading, self._stop = os.pipe()
        self._reader = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while self._stop_reading not in select.select([self._master, self._stop_reading], [], [])[0]:
                self._output += os.read(self._master, 65_536)

    @property
    def raw(self) -> bytes:
        """Everything that was written so far."""
        return bytes(self._output)

    @property
    def text(self) -> str:
        """Everything that was written so far, without escape sequences."""
        return _ESCAPES.sub("", self.raw.decode(errors="replace"))

    def press(self, keys: str) -> None:
        """Type; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    def wait_text(self, text: str, limit_s: float) -> None:
        """Until it was written. Raises SpesError with the end of what was."""
        until_s, pause = time.monotonic() + limit_s, threading.Event()
        while text not in self.text:
            if time.monotonic() > until_s:
                raise SpesError(f"no {text!r} in the terminal within {limit_s} s: {self.text[-2_000:]}")
            pause.wait(_LOOK_S)

    def wait_end(self, limit_s: float) -> int:
        """The exit code. Raises SpesError with the end of what was written if it does not end."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise SpesError(f"still running after {limit_s} s: {self.text[-2_000:]}") from error

    def close(self) -> None:
        """Close the window: the kernel sends SIGHUP to the session."""
        if self._master >= 0:
            # a read that is under way would keep the terminal open, until something is written
            os.close(self._stop)
            self._reader.join()
            os.close(self._stop_reading)
            os.close(self._master)
            self._master = -1

    def end(self) -> None:
        """Close it, and kill what does not end by that."""
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


_LEAD = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from spes_p2p.client.cli import main
main()
"""
