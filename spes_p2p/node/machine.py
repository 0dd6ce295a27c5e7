"""What this machine is doing: cores, memory, battery, and the GPUs that train. Measured every two seconds in a thread.

Whatever the machine, its driver or the operating system does not tell is None or left out; nothing of it is guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import pynvml

from spes_p2p.node.snapshot import GpuView, MachineView

MEASURE_EVERY_S = 2.0

T = TypeVar("T")


class Gpus:
    """The GPUs among some devices, as NVIDIA's driver sees them; empty without one, or with another maker's."""

    def __init__(self, devices: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> None:
        """`devices`: names such as `cpu` or `cuda:0`."""
        self._numbers = [int(name.partition(":")[2] or 0) for name in devices if name.startswith("cuda")]
        self._visible = [
            word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()
        ]
        self._handles: list[tuple[int, Any]] | None = None

    def views(self) -> tuple[GpuView, ...]:
        """One look. May take milliseconds: not for an event loop."""
        if self._handles is None:
            self._handles = self._find()
        return tuple(_gpu_view(number, handle) for number, handle in self._handles)

    def close(self) -> None:
        """Let go of the driver. Harmless when repeated."""
        if self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._handles = []

    def _find(self) -> list[tuple[int, Any]]:
        if not self._numbers or _told(pynvml.nvmlInit, failed=True):
            return []
        found = []
        for number in self._numbers:
            handle = _told(lambda number=number: self._handle(number))  # type: ignore[misc]  # mypy guesses no default
            if handle is not None:
                found.append((number, handle))
        return found

    def _handle(self, number: int) -> Any:
        """CUDA counts what CUDA_VISIBLE_DEVICES shows, the driver counts all."""
        name = self._visible[number] if number < len(self._visible) else str(number)
        if name.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)


def _told(call: Callable[[], T], *, failed: T | None = None) -> T | None:
    """What the driver says; `failed` where it does not know."""
    try:
        return call()
    except pynvml.NVMLError:
        return failed


def _gpu_view(number: int, handle: Any) -> GpuView:
    name = _told(lambda: pynvml.nvmlDeviceGetName(handle))
    memory = _told(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    milliwatts = _told(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    limit = _told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return GpuView(
        number=number,
        name=name.decode() if isinstance(name, bytes) else name or "",
        memory_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        use_percent=None if rates is None else int(rates.gpu),
        temperature_c=_told(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        power_w=None if milliwatts is None else milliwatts / 1000,
        power_limit_w=None if limit is None else limit / 1000,
    )


@dataclass(frozen=True, slots=True)
class _CpuUse:
    at_s: float
    own_s: float
    """CPU seconds of this node's processes."""
    idle_s: float
    """Of all cores together."""
    total_s: float


def busy_percent(then: _CpuUse, now: _CpuUse) -> float:
    """How busy all cores were in between, 0 to 100; 0 where no time has passed."""
    total_s = now.total_s - then.total_s
    if total_s <= 0:
        return 0.0
    return min(100.0, max(0.0, 100 * (1 - (now.idle_s - then.idle_s) / total_s)))


class MachineWatch:
    """The latest look at this machine. Until the first one only the device is known."""

    def __init__(self, devices: tuple[str, ...], trainer_pid: Callable[[], int | None] = lambda: None) -> None:
        self._trainer_pid = trainer_pid
        self._gpus = Gpus(devices)
        self._then: _CpuUse | None = None
        """At the look before."""
        self.latest = MachineView(device=", ".join(devices), num_cores=psutil.cpu_count() or 0)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                # a machine that does not let itself be looked at still trains
                with contextlib.suppress(psutil.Error, OSError):
                    self.latest = await asyncio.to_thread(self.measure)
                await asyncio.sleep(MEASURE_EVERY_S)
        finally:
            self._gpus.close()

    def measure(self) -> MachineView:
        """One look; blocks for milliseconds."""
        memory_bytes, own_s = self._own_use()
        # psutil.cpu_percent compares with its last call in the same thread, and these looks have any thread
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        now, then = _CpuUse(time.monotonic(), own_s, idle_s, sum(times[:8])), self._then
        self._then = now
        ram = psutil.virtual_memory()
        battery = _battery()
        return MachineView(
            device=self.latest.device,
            memory_bytes=memory_bytes,
            num_cores=self.latest.num_cores,
            # a process that has ended takes its seconds with it
            cores_used=None if then is None else max(0.0, now.own_s - then.own_s) / max(now.at_s - then.at_s, 1e-3),
            cpu_percent=None if then is None else busy_percent(then, now),
            ram_bytes=ram.total - ram.available,
            ram_total_bytes=ram.total,
            battery_percent=None if battery is None else battery[0],
            on_battery=None if battery is None else battery[1],
            gpus=self._gpus.views(),
        )

    def _own_use(self) -> tuple[int, float]:
        """(resident bytes of the node and its trainer, CPU seconds of them and of what they started)."""
        node = psutil.Process()
        trainer = self._trainer_pid()
        memory_bytes, cpu_s = node.memory_info().rss, sum(node.cpu_times()[:2])
        for child in node.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                cpu_s += sum(child.cpu_times()[:2])
                if trainer is not None and trainer in (child.pid, child.ppid()):
                    memory_bytes += child.memory_info().rss
        return memory_bytes, cpu_s


def _battery() -> tuple[float, bool] | None:
    """(charge in percent, whether it is what the machine runs on); None without one, or where that is not told."""
    if not hasattr(psutil, "sensors_battery"):
        return None
    try:
        found = psutil.sensors_battery()
    except OSError:
        return None
    if found is None or found.power_plugged is None:
        return None
    return float(found.percent), not found.power_plugged
