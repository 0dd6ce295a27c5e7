"""What this machine does, apart from this program: measured by psutil."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

import psutil

PACKAGE = "spes_p2p"
COMMANDS = ("spes-p2p", "spes-p2p-bootstrap")
_NAMES = ("python", "spes")
"""What the system calls our processes begins so; of no others is the command line read, which takes a while."""


class OtherLoad:
    """Cores that other programs take: all processor time of the machine without that of our own processes. Processes
    are told apart by their start, since numbers are used again.

    Our own are this process, whatever else runs this program on the machine, and the children of all of these: two
    nodes that took each other for somebody at work would hold each other for good. What runs in another container or
    belongs to somebody else cannot be seen everywhere, and counts as other programs then.
    """

    def __init__(self) -> None:
        self._at_s = time.monotonic()
        self._machine_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        """On average since the last call, or since this was made."""
        now_s, machine_s, own_s = time.monotonic(), _busy_s(), _own_s()
        elapsed_s = max(now_s - self._at_s, 1e-3)
        mine_s = sum(taken - self._own_s.get(process, 0.0) for process, taken in own_s.items())
        others_s = (machine_s - self._machine_s) - mine_s
        self._at_s, self._machine_s, self._own_s = now_s, machine_s, own_s
        return max(0.0, others_s / elapsed_s)


def _busy_s() -> float:
    """Processor seconds of everything since the machine's start; waiting for disks, and for a hypervisor, is none."""
    times = psutil.cpu_times()
    not_ours = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    # Linux counts guests' time within user's and nice's, so that it must not be added again
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - not_ours - guests)


def _own_s() -> dict[tuple[int, float], float]:
    """(number, start) of each of our own processes -> processor seconds it has taken."""
    processes: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    roots = {os.getpid()}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                parents[process.pid] = process.ppid()
                processes[process.pid] = process
                if process.name().lower().startswith(_NAMES) and is_ours(process.cmdline()):
                    roots.add(process.pid)
        except psutil.Error:  # it has just ended, or is not ours to look at
            continue
    found: dict[tuple[int, float], float] = {}
    for pid in with_descendants(roots, parents) & processes.keys():
        try:
            taken = processes[pid].cpu_times()
            found[pid, processes[pid].create_time()] = taken.user + taken.system
        except psutil.Error:
            continue
    return found


def is_ours(words: Sequence[str]) -> bool:
    """Whether this is the command line of a process that runs this program."""
    if any(PurePath(word).name in COMMANDS for word in words[:2]):  # the script, or an interpreter and the script
        return True
    return any(flag == "-m" and module.partition(".")[0] == PACKAGE for flag, module in pairwise(words))


def with_descendants(roots: set[int], parents: Mapping[int, int]) -> set[int]:
    """The processes of `roots`, their children, and theirs. `parents`: number of a process -> of its parent."""
    found, others = set(roots), set(parents) - roots
    while children := {pid for pid in others if parents[pid] in found}:
        found |= children
        others -= children
    return found


def on_battery() -> bool | None:
    """Whether this machine runs on its battery; None: it has none, or does not say."""
    ask = getattr(psutil, "sensors_battery", None)
    battery = ask() if ask is not None else None
    if battery is None or battery.power_plugged is None:
        return None
    return not battery.power_plugged
