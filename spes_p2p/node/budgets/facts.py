"""What this machine does, apart from this node: measured by psutil."""

from __future__ import annotations

import time

import psutil


class OtherLoad:
    """Cores that other programs take: all processor time of the machine without that of this process, its children and
    theirs. Processes are told apart by their start, since numbers are used again."""

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
    found: dict[tuple[int, float], float] = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            taken = process.cpu_times()
            found[process.pid, process.create_time()] = taken.user + taken.system
        except psutil.Error:  # it has just ended, or is not ours to look at
            continue
    return found


def on_battery() -> bool | None:
    """Whether this machine runs on its battery; None: it has none, or does not say."""
    ask = getattr(psutil, "sensors_battery", None)
    battery = ask() if ask is not None else None
    if battery is None or battery.power_plugged is None:
        return None
    return not battery.power_plugged
