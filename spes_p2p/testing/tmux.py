"""A terminal that can be looked at: tmux runs a command, takes keys, and tells what is on the screen."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spes_p2p.errors import SpesError

_LOOK_S = 0.2


def has_tmux() -> bool:
    """Whether tmux is installed."""
    return shutil.which("tmux") is not None


class Tmux:
    """One command in a tmux server of its own. The screen stays when the command has ended. `end` ends the server."""

    def __init__(
        self, folder: Path, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (80, 24)
    ) -> None:
        """`folder`: where its socket may lie, with a short path; `size`: columns and rows."""
        self._base = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        line = f"{shlex.join(command)}; echo ended with $?; exec cat"
        width, height = size
        # standard error stays the terminal: Textual draws there
        subprocess.run(
            [*self._base, "new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c", line],
            env=dict(environment), check=True, timeout=60,
        )  # fmt: skip
        self._tmux("set-option", "-g", "window-size", "manual")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._base, *arguments], capture_output=True, text=True, check=True, timeout=60, stdin=subprocess.DEVNULL
        )
        return done.stdout

    def screen(self, *, escapes: bool = False) -> str:
        """What is on the screen; `escapes`: with the sequences for colours."""
        return self._tmux("capture-pane", "-p", *(["-e"] if escapes else []))

    def press(self, *keys: str) -> None:
        """Keys as tmux names them, such as `q`, `Tab`, `C-c`."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Another size of the terminal."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def wait(self, until: Callable[[str], bool], limit_s: float, what: str) -> str:
        """The screen, once it is so. Raises SpesError with the screen as it is."""
        until_s, pause = time.monotonic() + limit_s, threading.Event()
        while not until(screen := self.screen()):
            if time.monotonic() > until_s:
                raise SpesError(f"no {what} on the screen within {limit_s} s:\n{screen}")
            pause.wait(_LOOK_S)
        return screen

    def wait_text(self, limit_s: float, *words: str) -> str:
        """The screen, once it has all these words. Raises SpesError with the screen as it is."""
        return self.wait(lambda screen: all(word in screen for word in words), limit_s, " and ".join(map(repr, words)))

    def end(self) -> None:
        """End the server and with it the terminal."""
        subprocess.run([*self._base, "kill-server"], capture_output=True, check=False, timeout=60)
