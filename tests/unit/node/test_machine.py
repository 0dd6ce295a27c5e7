"""What a node knows of its machine, with and without a GPU's driver."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from spes_p2p.node.machine import Gpus, MachineWatch
from spes_p2p.node.snapshot import GpuView


@dataclass
class Driver:
    """NVIDIA's management library with two GPUs; the second tells neither power nor temperature."""

    closed: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ["Init", "Shutdown", "DeviceGetHandleByIndex", "DeviceGetHandleByUUID", "DeviceGetName"]
        names += ["DeviceGetMemoryInfo", "DeviceGetUtilizationRates", "DeviceGetTemperature", "DeviceGetPowerUsage"]
        for name in [*names, "DeviceGetEnforcedPowerLimit"]:
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name))

    def Init(self) -> None:
        return None

    def Shutdown(self) -> None:
        self.closed += 1

    def DeviceGetHandleByIndex(self, number: int) -> int:
        if number > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return number

    def DeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-second": 1}[name]

    def DeviceGetName(self, handle: int) -> str:
        return f"Model {handle}"

    def DeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=24 << 30)

    def DeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=87)

    def DeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._unless_second(handle, 64)

    def DeviceGetPowerUsage(self, handle: int) -> int:
        return self._unless_second(handle, 211_500)

    def DeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self._unless_second(handle, 350_000)

    def _unless_second(self, handle: int, value: int) -> int:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


SECOND = GpuView(
    number=0, name="Model 1", memory_bytes=3 << 30, memory_total_bytes=24 << 30, use_percent=87,
    temperature_c=None, power_w=None, power_limit_w=None,
)  # fmt: skip


def test_gpu_tells_what_its_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.install(monkeypatch)
    gpus = Gpus(("cuda:0", "cuda:1"), {})
    first, second = gpus.views()
    assert (first.name, first.temperature_c, first.power_w, first.power_limit_w) == ("Model 0", 64, 211.5, 350.0)
    assert (second.number, second.name, second.temperature_c, second.power_w) == (1, "Model 1", None, None)
    gpus.close()
    gpus.close()
    assert driver.closed == 1


@pytest.mark.parametrize("visible", ["1", "GPU-second", " 1 ,0"])
def test_gpus_are_counted_as_cuda_shows_them(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    Driver().install(monkeypatch)
    assert Gpus(("cuda:0",), {"CUDA_VISIBLE_DEVICES": visible}).views() == (SECOND,)


def test_gpu_that_the_driver_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver().install(monkeypatch)
    assert Gpus(("cuda:7",), {}).views() == ()


def test_cpu_asks_no_driver_and_a_missing_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert Gpus(("cuda:0",), {}).views() == ()
    assert Gpus(("cpu",), {}).views() == ()


def test_battery_is_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(percent=41.5, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    view = MachineWatch(("cpu",)).measure()
    assert (view.battery_percent, view.on_battery) == (41.5, True)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    view = MachineWatch(("cpu",)).measure()
    assert (view.battery_percent, view.on_battery) == (None, None)


async def test_cores_are_seen_as_busy_from_whatever_thread() -> None:
    watch = MachineWatch(("cpu",))
    await asyncio.to_thread(watch.measure)
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    second = await asyncio.to_thread(watch.measure)
    assert second.cpu_percent is not None
    assert second.cpu_percent > 1
    assert second.cores_used is not None
    assert second.cores_used > 0


def test_use_of_cores_is_known_from_the_second_look_on() -> None:
    watch = MachineWatch(("cpu",), os.getpid)
    first, second = watch.measure(), watch.measure()
    assert (first.cores_used, first.cpu_percent) == (None, None)
    assert second.cores_used is not None
    assert second.cores_used >= 0
    assert second.memory_bytes > 1 << 20
    assert 0 < second.ram_bytes < second.ram_total_bytes
