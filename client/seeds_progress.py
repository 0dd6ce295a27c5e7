"""How far a simulation of many seeds is: one line that is rewritten in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from spes_p2p.client.output import duration_text

FIRST_S = 10.0
EVERY_S = 60.0
"""Where there is no terminal: the first line, and the next ones."""
_ERASE = "\r\x1b[K"


@dataclass(slots=True)
class SeedsProgress:
    """Counts seeds and says so on `stream`."""

    num_seeds: int
    played: int = 0
    failed: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    now_s: Callable[[], float] = time.monotonic
    _played_before: int = 0
    _began_s: float = 0.0
    _next_s: float = 0.0
    _is_shown: bool = False

    def __post_init__(self) -> None:
        self._began_s = self.now_s()
        self._next_s = 0.0 if self.stream.isatty() else FIRST_S

    def start(self, num_played: int) -> None:
        """So many were played by an earlier command."""
        self.played = self._played_before = num_played

    def finished(self, seed: int, *, failed: bool) -> None:
        """A seed has been played; a failure is told at once."""
        self.played += 1
        if failed:
            self.failed += 1
            self.close()
            self._write(f"seed {seed} failed\n")

    def look(self, rounds: Mapping[int, int]) -> None:
        """Say how far it is, if it is time to. `rounds`: newest certified round of each seed under way."""
        passed_s = self.now_s() - self._began_s
        if passed_s < self._next_s:
            return
        text = self._text(passed_s, rounds)
        if self.stream.isatty():
            width = shutil.get_terminal_size().columns
            self._write(_ERASE + text[: width - 1])
            self._is_shown = True
        else:
            self._write(text + "\n")
            self._next_s = passed_s + EVERY_S

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._is_shown:
            self._write(_ERASE)
            self._is_shown = False

    def _text(self, passed_s: float, rounds: Mapping[int, int]) -> str:
        here, left = self.played - self._played_before, self.num_seeds - self.played
        parts = [f"{self.played:,} of {self.num_seeds:,} seeds played, {self.failed} failed"]
        under_way = ", ".join(f"{seed} in round {number + 1}" for seed, number in sorted(rounds.items()))
        if under_way:
            parts.append(f"seed {under_way}")
        parts.append(f"{duration_text(1000 * passed_s)} so far")
        if here and left:
            parts.append(f"about {duration_text(1000 * passed_s * left / here)} left")
        return "; ".join(parts)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
