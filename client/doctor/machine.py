"""What this machine has: versions, the network daemon, disk, memory, GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from spes_p2p.client.doctor.finding import Finding, fail, of_error, ok, warn
from spes_p2p.errors import ConfigError, MachineError
from spes_p2p.units import bytes_text

OLDEST_PYTHON = (3, 11)
NEEDED_DISK_BYTES, WANTED_DISK_BYTES = 200_000_000, 2_000_000_000
WRITTEN_BYTES = 16 << 20
SLOW_DISK_BYTES_PER_S = 10_000_000
NEEDED_MEMORY_BYTES = 1_000_000_000
"""A node with an idle trainer has about 350 MB, a tiny run trains with twice that."""
INSTALL = "Run `make setup` again, or install spes-p2p into a fresh environment."
_DAEMON_TIMEOUT_S = 20.0


def python_version() -> Finding:
    """The interpreter and the system."""
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return fail("python", f"{version} on {system}", "Use Python 3.11 or newer: `make PYTHON=python3.12 setup`.")
    return ok("python", f"{version} on {system}")


def packages() -> Finding:
    """Whether the installed libraries are those that this version asks for."""
    try:
        version, wanted = importlib.metadata.version("spes-p2p"), importlib.metadata.requires("spes-p2p") or []
    except importlib.metadata.PackageNotFoundError:
        return warn("packages", "spes-p2p runs from its sources and is not installed", INSTALL)
    problems = [text for text in map(_requirement_problem, wanted) if text]
    if problems:
        return fail("packages", "; ".join(problems), INSTALL)
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "hivemind"))
    return ok("packages", f"spes-p2p {version} with {shown}")


def _requirement_problem(requirement: str) -> str:
    """What is wrong with one dependency; empty: nothing. Knows the two forms that ours have, `==` and `>=`."""
    match = re.match(r"([A-Za-z0-9_.-]+)\s*(==|>=)?\s*([0-9.]*)", requirement)
    if match is None or "extra ==" in requirement:
        return ""
    name, operator, bound = match.groups()
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    numbers, limit = _numbers(found), _numbers(bound)
    if (operator == ">=" and numbers < limit) or (operator == "==" and numbers[: len(limit)] != limit):
        return f"{name} {found} is installed, {operator} {bound} is needed"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def daemon() -> Finding:
    """Whether the libp2p daemon is there and runs on this processor. hivemind itself is slow and stays out."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        return fail("daemon", "hivemind, which carries the network daemon, is not installed", INSTALL)
    program = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    if not program.is_file():
        return fail("daemon", f"{program} is missing: hivemind was built without it", INSTALL)
    try:
        # it prints its flags and ends
        done = subprocess.run(
            [str(program), "-help"], capture_output=True, timeout=_DAEMON_TIMEOUT_S, check=False, text=True
        )
    except OSError as error:
        return fail("daemon", f"{program} does not start: {error.strerror}", f"Run: chmod +x {program}, or: {INSTALL}")
    except subprocess.TimeoutExpired:
        return fail("daemon", f"{program} does not answer within {_DAEMON_TIMEOUT_S:.0f} s", INSTALL)
    if "hostAddrs" not in done.stdout + done.stderr:
        return fail("daemon", f"{program} does not know its own flags (exit code {done.returncode})", INSTALL)
    return ok("daemon", f"p2pd of hivemind {importlib.metadata.version('hivemind')} starts")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def disk(folder: Path, needed_bytes: int) -> Iterator[Finding]:
    """Free space where the data folder is or will be, and how fast it is written durably.

    `needed_bytes`: what the run's state takes, as far as it is known.
    """
    from spes_p2p.storage.atomic import temp_file

    place = existing(folder)
    free = shutil.disk_usage(place).free
    fact = f"{bytes_text(free)} free in {place}"
    needed = max(NEEDED_DISK_BYTES, needed_bytes)
    if free < needed:
        yield fail("disk", f"{fact}, {bytes_text(needed)} are needed", "Free some space, or name another --data-dir.")
    elif free < max(WANTED_DISK_BYTES, 2 * needed_bytes):
        yield warn("disk", fact, "It may fill up in a long run: free some space, or name another --data-dir.")
    else:
        yield ok("disk", fact)
    if free < 4 * WRITTEN_BYTES:
        return
    try:
        began_s = time.perf_counter()
        with temp_file(place) as temp:
            temp.write(os.urandom(WRITTEN_BYTES))
            temp.sync()
        rate = WRITTEN_BYTES / (time.perf_counter() - began_s)
    except MachineError as error:
        yield of_error("disk speed", error)
        return
    fact = f"{bytes_text(rate)}/s written and synced, of {bytes_text(WRITTEN_BYTES)}"
    if rate < SLOW_DISK_BYTES_PER_S:
        yield warn("disk speed", fact, "Rounds may wait for this disk: use a faster one for --data-dir.")
    else:
        yield ok("disk speed", fact)


def memory() -> Finding:
    """Main memory that is free now; what a run needs of it is for `estimate`."""
    import psutil

    state = psutil.virtual_memory()
    fact = f"{bytes_text(state.available)} of {bytes_text(state.total)} are free"
    if state.available < NEEDED_MEMORY_BYTES:
        return fail("memory", fact, "End other programs: even a tiny run takes 1 GB.")
    return ok("memory", fact)


def gpu(wanted: str | None) -> Finding:
    """NVIDIA's driver, and whether torch sees what it has. `wanted`: of `--gpu`."""
    found, problem = _driver()
    if wanted == "none":
        return ok("gpu", f"not asked for (--gpu none); the driver has {', '.join(found) or 'none'}")
    if not found:
        fact = f"none: {problem}"
        if wanted is not None:
            return fail("gpu", fact, f"--gpu {wanted} cannot be had; `--gpu none` trains on the CPU.")
        return ok("gpu", f"{fact}; training goes on the CPU")
    from spes_p2p.client.gpu import choose_devices

    try:
        devices = choose_devices(wanted)
    except (MachineError, ConfigError) as error:
        return fail("gpu", str(error), "See --gpu in `spes-p2p join --help`.")
    if devices == ("cpu",):
        fact = f"{', '.join(found)}, which torch does not see"
        return warn("gpu", fact, "Install a torch with CUDA for this driver, or join with --gpu none.")
    return ok("gpu", f"{', '.join(found)}; torch sees {', '.join(devices)}")


def _driver() -> tuple[list[str], str]:
    """(names and free memory of the GPUs, why there are none)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [
            f"{pynvml.nvmlDeviceGetName(handle)} ({bytes_text(pynvml.nvmlDeviceGetMemoryInfo(handle).free)} free)"
            for handle in handles
        ], "the driver has no GPU"
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver fails ({error})"
    finally:
        pynvml.nvmlShutdown()
