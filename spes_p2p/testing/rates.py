"""What really leaves: bytes that a process has sent over TCP, as the kernel counts them, and the most in any window."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

Samples = list[tuple[float, int]]
"""(seconds, bytes so far), ascending."""
SAMPLE_S = 0.2
_SOCKET = re.compile(r"^\S+ +\d+ +\d+ +(\S+) +(\S+) .*?\bpid=(\d+),.*?\bbytes_sent:(\d+)", re.MULTILINE)


class SentMeter:
    """Bytes that a network daemon has sent to others: encryption, its own protocols and repeated segments included, the
    heads of packets not. Asks `ss` of iproute2 (Linux)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._sent: dict[tuple[str, str], int] = {}
        """(here, there) -> bytes; sockets that are closed keep their last count."""

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has `ss`."""
        return shutil.which("ss") is not None

    def total(self) -> int:
        """Of all sockets so far."""
        shown = subprocess.run(["ss", "-tiHnpO"], capture_output=True, text=True, check=True).stdout
        for here, there, pid, sent in _SOCKET.findall(shown):
            if int(pid) == self._pid:
                self._sent[here, there] = int(sent)
        return sum(self._sent.values())


async def watch_sent(pid: int, until: asyncio.Task[Any]) -> Samples:
    """Samples of what a daemon has sent, five a second, until the task is done."""
    meter = SentMeter(pid)
    samples = [(time.monotonic(), await asyncio.to_thread(meter.total))]
    while not until.done():
        await asyncio.wait({until}, timeout=SAMPLE_S)
        samples.append((time.monotonic(), await asyncio.to_thread(meter.total)))
    return samples


def window_rates(samples: Sequence[tuple[float, int]], window_s: float) -> list[float]:
    """Bytes per second of every window of this length that begins and ends between samples; empty: too short a time.

    Each window is the shortest stretch between two samples that is at least as long, over its own length.
    """
    rates, end = [], 0
    for begin, (began_s, before) in enumerate(samples):
        end = max(end, begin)
        while end < len(samples) and samples[end][0] - began_s < window_s:
            end += 1
        if end == len(samples):
            break
        rates.append((samples[end][1] - before) / (samples[end][0] - began_s))
    return rates
