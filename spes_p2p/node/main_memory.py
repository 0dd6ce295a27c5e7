"""How much main memory this process may still take: what the machine has free, or what its container allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def free_main_memory() -> int:
    """Bytes. The kernel ends processes of a container that takes more than its limit, whatever the machine has."""
    free = psutil.virtual_memory().available
    return min([free, *free_in_cgroups(CGROUPS, OWN_CGROUP)]) if sys.platform == "linux" else free


def free_in_cgroups(root: Path, own: Path) -> Iterator[int]:
    """What each control group of this process (version 2) has left under its limit, those without one left out. Cached
    files count as free: the kernel drops them when it needs their pages."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if not line.startswith("0::/"):
            continue
        place = root / line.removeprefix("0::/")
        for group in (place, *place.parents):
            left = _left_in(group)
            if left is not None:
                yield left
            if group == root:
                break


def _left_in(group: Path) -> int | None:
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = next(
            (
                int(line.split()[1])
                for line in (group / "memory.stat").read_text().splitlines()
                if line.startswith("inactive_file ")
            ),
            0,
        )
        return None if limit == "max" else max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None
