"""NVIDIA's driver as far as limits of power ask it, for `budgets.power.GpuPower`."""

from __future__ import annotations


class NVMLError(Exception):
    """What the driver raises."""


class NVMLError_NoPermission(NVMLError):  # the driver's own name
    """This user may not."""


class FakeNvml:
    """Three GPUs, one of them known by its UUID; has the names of pynvml."""

    NVMLError = NVMLError
    NVMLError_NoPermission = NVMLError_NoPermission

    def __init__(self, *, permits: bool = True) -> None:
        self.permits = permits
        self.watts: dict[int | str, int] = {0: 300, 1: 310, "GPU-abc": 320}
        """GPU -> its limit now."""
        self.most: dict[int | str, int] = {}
        """GPU -> most watts, where they are not 350."""
        self.refuses: set[tuple[int | str, int]] = set()
        """(GPU, watts) that it does not set."""
        self.loaded = True
        self.opened = 0

    def nvmlInit(self) -> None:
        """Once more open."""
        if not self.loaded:
            raise NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        """Once less open."""
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """Its number is its handle."""
        if index not in self.watts:
            raise NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        """Its UUID is its handle."""
        return name

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int | str) -> tuple[int, int]:
        """(least, most) in milliwatts."""
        return 100_000, self.most.get(handle, 350) * 1000

    def nvmlDeviceGetPowerManagementLimit(self, handle: int | str) -> int:
        """In milliwatts."""
        return self.watts[handle] * 1000

    def nvmlDeviceSetPowerManagementLimit(self, handle: int | str, milliwatts: int) -> None:
        """Raises NVMLError, NVMLError_NoPermission."""
        if not self.permits:
            raise NVMLError_NoPermission("Insufficient Permissions")
        if (handle, milliwatts // 1000) in self.refuses:
            raise NVMLError("Unknown Error")
        self.watts[handle] = milliwatts // 1000
