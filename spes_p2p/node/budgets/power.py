"""A limit on the power of GPUs, through NVIDIA's driver (NVML), where it lets this user set one.

The driver remembers a limit beyond the end of the process, so what was there before is put back at the end. After a
kill it stays until the next proper end, or until the driver is loaded again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
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
        """Limit each GPU to so many watts; None: as it was before the first limit.

        Raises MachineError if there is no GPU, the value is out of a GPU's range, or the driver does not let this user:
        each GPU then has the limit that it had before this call, or the message names those that have not.
        """
        if watts is None:
            self._take_away()
            return
        gpus = [device for device in self.devices if device.startswith("cuda")]
        if not gpus:
            raise MachineError("--gpu-power: this node trains on the CPU\nTake the limit away: --gpu-power off.")
        try:
            with self._driver():
                handles = {gpu: self._handle(gpu) for gpu in gpus}
                for gpu, handle in handles.items():  # all are looked at before the first one is changed
                    self._check_range(gpu, handle, watts)
                found = {gpu: self.nvml.nvmlDeviceGetPowerManagementLimit(handle) for gpu, handle in handles.items()}
                self._set_all(dict.fromkeys(gpus, watts * MILLI), found)
        except self.nvml.NVMLError as error:
            raise MachineError(self._refused(watts, error)) from error
        self._before = found | self._before

    def _take_away(self) -> None:
        """Raises MachineError if the driver keeps a limit of ours."""
        if not self._has_to_undo():
            return
        try:
            with self._driver():
                found = {gpu: self.nvml.nvmlDeviceGetPowerManagementLimit(self._handle(gpu)) for gpu in self._before}
                self._set_all(self._before, found)
        except self.nvml.NVMLError as error:
            raise MachineError(f"--gpu-power off: the driver refuses it: {error}") from error
        self._before = {}

    def _set_all(self, wanted: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Set these limits, in milliwatts, or put all back to what was found. Raises NVMLError; MachineError that names
        the GPUs that were not put back."""
        done: list[str] = []
        try:
            for gpu, milliwatts in wanted.items():
                self.nvml.nvmlDeviceSetPowerManagementLimit(self._handle(gpu), milliwatts)
                done.append(gpu)
        except self.nvml.NVMLError as error:
            left = self._put_back({gpu: found[gpu] for gpu in done})
            if not left:
                raise
            self._before = dict(found) | self._before  # so that the end tries once more
            kept = ", ".join(f"{gpu} stays at {wanted[gpu] // MILLI} W" for gpu in left)
            raise MachineError(f"--gpu-power: the driver refuses it ({error}), and to undo it: {kept}") from error

    def _put_back(self, limits: Mapping[str, int]) -> list[str]:
        """Set these limits, in milliwatts, as far as the driver does; the GPUs where it does not."""
        left = []
        for gpu, milliwatts in limits.items():
            try:
                self.nvml.nvmlDeviceSetPowerManagementLimit(self._handle(gpu), milliwatts)
            except self.nvml.NVMLError:
                left.append(gpu)
        return left

    def _check_range(self, gpu: str, handle: Any, watts: int) -> None:
        least, most = (value // MILLI for value in self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
        if not least <= watts <= most:
            raise MachineError(f"--gpu-power {watts}W: {gpu} takes limits from {least} W to {most} W")

    def _refused(self, watts: int, error: Exception) -> str:
        if isinstance(error, self.nvml.NVMLError_NoPermission):
            return (
                f"--gpu-power {watts}W: the driver lets only an administrator limit power\n"
                f"Ask one for `nvidia-smi --power-limit {watts}`, or use --gpu-share 70% instead."
            )
        return f"--gpu-power {watts}W: the driver refuses it: {error}\nUse --gpu-share 70% instead."

    def restore(self) -> None:
        """At the end: put back what was there before, as far as the driver is there and does."""
        if self._has_to_undo():
            with self._driver():
                left = self._put_back(self._before)
            self._before = {gpu: self._before[gpu] for gpu in left}

    def _has_to_undo(self) -> bool:
        """Whether there may be limits of ours in the driver; one that has gone remembers none."""
        if self._before:
            try:
                with self._driver():
                    return True
            except self.nvml.NVMLError:
                self._before = {}
        return False

    @contextlib.contextmanager
    def _driver(self) -> Iterator[None]:
        self.nvml.nvmlInit()
        try:
            yield
        finally:
            with contextlib.suppress(self.nvml.NVMLError):  # what was set is set
                self.nvml.nvmlShutdown()

    def _handle(self, gpu: str) -> Any:
        """NVML counts all GPUs of the machine, PyTorch those of CUDA_VISIBLE_DEVICES."""
        number = int(gpu.partition(":")[2] or 0)
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[number] if number < len(visible) else str(number)
        if name.isdecimal():
            return self.nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self.nvml.nvmlDeviceGetHandleByUUID(name)
