"""What really leaves: bytes that a network daemon has written, read from the kernel, and the most in any window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import psutil

Samples = list[tuple[float, int]]
"""(seconds, bytes so far), ascending."""
SAMPLE_S = 0.05


def bytes_written(pid: int) -> int:
    """What a process has given to the kernel to write since its start, sockets included: of a network daemon, all that
    it sent to others, encryption and the daemon's own protocols included, and the little it told its node. Linux."""
    counters = psutil.Process(pid).io_counters()
    return int(counters.write_chars)


async def watch_bytes(pid: int, until: asyncio.Task[Any]) -> Samples:
    """Samples of `bytes_written`, twenty a second, until the task is done."""
    samples = [(time.monotonic(), bytes_written(pid))]
    while not until.done():
        await asyncio.wait({until}, timeout=SAMPLE_S)
        samples.append((time.monotonic(), bytes_written(pid)))
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
