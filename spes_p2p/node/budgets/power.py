"""A limit on the power of GPUs, through NVIDIA's driver (NVML), where it lets this user set one.

The driver remembers a limit beyond the end of the process, so what was there before is put back at the end. After a
kill it stays until the next proper end, or until the driver is loaded again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from spes_p2p.errors import MachineError

MILLI = 1000


def _nvml() -> ModuleType:
    import pynvml

    module: ModuleType = pynvml
    return module


@dataclass(slots=True)
class GpuPower:
    """The GPUs of one node, named as PyTorch does (`cuda:0`)."""

    devices: Sequence[str]
    nvml: Any = field(default_factory=_nvml)
    _before: dict[str, int] = field(default_factory=dict)
    """Device -> its limit in milliwatts before the first `set`."""

    def set(self, watts: int | None) -> None:
        """Limit each GPU to so many watts; None: as it was. Raises MachineError, with nothing changed, if there is no
        GPU, the value is out of its range, or the driver does not let this user."""
        if watts is None:
            self.restore()
            return
        gpus = [device for device in self.devices if device.startswith("cuda")]
        if not gpus:
            raise MachineError("--gpu-power: this node trains on the CPU\nTake the limit away: --gpu-power off.")
        done: list[str] = []
        try:
            self.nvml.nvmlInit()
            try:
                for gpu in gpus:
                    self._set_one(gpu, watts)
                    done.append(gpu)
            finally:
                self.nvml.nvmlShutdown()
        except MachineError:
            self._undo(done)
            raise
        except self.nvml.NVMLError as error:
            self._undo(done)
            raise MachineError(self._refused(watts, error)) from error

    def _set_one(self, gpu: str, watts: int) -> None:
        handle = self._handle(gpu)
        least, most = (value // MILLI for value in self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
        if not least <= watts <= most:
            raise MachineError(f"--gpu-power {watts}W: {gpu} takes limits from {least} W to {most} W")
        before = self.nvml.nvmlDeviceGetPowerManagementLimit(handle)
        self.nvml.nvmlDeviceSetPowerManagementLimit(handle, watts * MILLI)
        self._before.setdefault(gpu, before)

    def _refused(self, watts: int, error: Exception) -> str:
        if isinstance(error, self.nvml.NVMLError_NoPermission):
            return (
                f"--gpu-power {watts}W: the driver lets only an administrator limit power\n"
                f"Ask one for `nvidia-smi --power-limit {watts}`, or use --gpu-share 70% instead."
            )
        return f"--gpu-power {watts}W: the driver refuses it: {error}\nUse --gpu-share 70% instead."

    def restore(self) -> None:
        """Put back what was there before, as far as the driver is there."""
        self._undo(list(self._before))

    def _undo(self, gpus: Sequence[str]) -> None:
        if not gpus:
            return
        try:
            self.nvml.nvmlInit()
            try:
                for gpu in gpus:
                    if gpu in self._before:
                        self.nvml.nvmlDeviceSetPowerManagementLimit(self._handle(gpu), self._before.pop(gpu))
            finally:
                self.nvml.nvmlShutdown()
        except self.nvml.NVMLError:
            return  # a driver that has gone remembers no limit either

    def _handle(self, gpu: str) -> Any:
        """NVML counts all GPUs of the machine, PyTorch those of CUDA_VISIBLE_DEVICES."""
        number = int(gpu.partition(":")[2] or 0)
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[number] if number < len(visible) else str(number)
        if name.isdecimal():
            return self.nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self.nvml.nvmlDeviceGetHandleByUUID(name)
