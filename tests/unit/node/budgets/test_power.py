"""A limit on the GPUs' power, on a driver that exists in this test alone."""

from __future__ import annotations

import pytest

from spes_p2p.errors import MachineError
from spes_p2p.node.budgets.power import GpuPower


class NVMLError(Exception):
    pass


class NVMLError_NoPermission(NVMLError):  # the driver's own name
    pass


class Driver:
    """NVML as far as it is asked."""

    NVMLError = NVMLError
    NVMLError_NoPermission = NVMLError_NoPermission

    def __init__(self, *, permits: bool = True) -> None:
        self.permits = permits
        self.watts = {0: 300, 1: 310, "GPU-abc": 320}
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index not in self.watts:
            raise NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> tuple[int, int]:
        return 100_000, 350_000

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return self.watts[handle] * 1000

    def nvmlDeviceSetPowerManagementLimit(self, handle: int, milliwatts: int) -> None:
        if not self.permits:
            raise NVMLError_NoPermission("Insufficient Permissions")
        self.watts[handle] = milliwatts // 1000


def test_each_gpu_is_limited_and_gets_back_what_it_had() -> None:
    driver = Driver()
    power = GpuPower(("cuda:0", "cuda:1"), driver)
    power.set(200)
    power.set(150)
    assert driver.watts[0] == driver.watts[1] == 150
    power.set(None)
    assert (driver.watts[0], driver.watts[1], driver.opened) == (300, 310, 0)
    power.restore()


def test_without_permission_it_is_refused_with_what_helps() -> None:
    driver = Driver(permits=False)
    with pytest.raises(MachineError, match=r"only an administrator.*\n.*--gpu-share"):
        GpuPower(("cuda:0",), driver).set(200)
    assert (driver.watts[0], driver.opened) == (300, 0)


def test_values_out_of_range_and_cpus_are_refused() -> None:
    driver = Driver()
    with pytest.raises(MachineError, match="from 100 W to 350 W"):
        GpuPower(("cuda:0",), driver).set(50)
    with pytest.raises(MachineError, match="trains on the CPU"):
        GpuPower(("cpu",), driver).set(200)
    with pytest.raises(MachineError, match="no such device"):
        GpuPower(("cuda:0", "cuda:7"), driver).set(200)
    assert (driver.watts[0], driver.opened) == (300, 0)
    GpuPower(("cpu",), driver).set(None)


def test_the_gpu_that_pytorch_sees_first_is_the_one_that_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    GpuPower(("cuda:0", "cuda:1"), driver).set(200)
    assert driver.watts == {0: 300, 1: 200, "GPU-abc": 200}
