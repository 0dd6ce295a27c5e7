"""A limit on the GPUs' power, on a driver that is not there."""

from __future__ import annotations

import pytest

from spes_p2p.errors import MachineError
from spes_p2p.node.budgets.power import GpuPower
from spes_p2p.testing.gpu_driver import FakeNvml


def test_each_gpu_is_limited_and_gets_back_what_it_had() -> None:
    driver = FakeNvml()
    power = GpuPower(("cuda:0", "cuda:1"), driver)
    power.set(200)
    power.set(150)
    assert driver.watts[0] == driver.watts[1] == 150
    power.set(None)
    assert (driver.watts[0], driver.watts[1], driver.opened) == (300, 310, 0)
    power.restore()


def test_without_permission_it_is_refused_with_what_helps() -> None:
    driver = FakeNvml(permits=False)
    with pytest.raises(MachineError, match=r"only an administrator.*\n.*--gpu-share"):
        GpuPower(("cuda:0",), driver).set(200)
    assert (driver.watts[0], driver.opened) == (300, 0)


def test_values_out_of_range_and_cpus_are_refused() -> None:
    driver = FakeNvml()
    with pytest.raises(MachineError, match="from 100 W to 350 W"):
        GpuPower(("cuda:0",), driver).set(50)
    with pytest.raises(MachineError, match="trains on the CPU"):
        GpuPower(("cpu",), driver).set(200)
    with pytest.raises(MachineError, match="no such device"):
        GpuPower(("cuda:0", "cuda:7"), driver).set(200)
    assert (driver.watts[0], driver.opened) == (300, 0)
    GpuPower(("cpu",), driver).set(None)


def test_the_gpu_that_pytorch_sees_first_is_the_one_that_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    GpuPower(("cuda:0", "cuda:1"), driver).set(200)
    assert driver.watts == {0: 300, 1: 200, "GPU-abc": 200}


def test_a_second_limit_that_one_gpu_does_not_take_leaves_the_first_in_force_on_all() -> None:
    driver = FakeNvml()
    power = GpuPower(("cuda:0", "cuda:1"), driver)
    power.set(200)
    driver.refuses.add((1, 150))
    with pytest.raises(MachineError, match="--gpu-power 150W: the driver refuses it: Unknown Error"):
        power.set(150)
    assert (driver.watts[0], driver.watts[1]) == (200, 200)
    power.restore()
    assert (driver.watts[0], driver.watts[1], driver.opened) == (300, 310, 0)


def test_no_gpu_is_changed_where_one_cannot_take_the_value() -> None:
    driver = FakeNvml()
    driver.most[1] = 250
    driver.refuses = {(0, watts) for watts in range(1000)}  # not even asked
    with pytest.raises(MachineError, match="cuda:1 takes limits from 100 W to 250 W"):
        GpuPower(("cuda:0", "cuda:1"), driver).set(300)
    assert (driver.watts[0], driver.watts[1]) == (300, 310)


def test_a_gpu_that_is_not_put_back_is_named_and_tried_again_at_the_end() -> None:
    driver = FakeNvml()
    power = GpuPower(("cuda:0", "cuda:1"), driver)
    driver.refuses = {(1, 200), (0, 300)}
    with pytest.raises(MachineError, match="and to undo it: cuda:0 stays at 200 W"):
        power.set(200)
    assert driver.watts[0] == 200
    driver.refuses.clear()
    power.restore()
    assert (driver.watts[0], driver.watts[1]) == (300, 310)


def test_a_limit_that_the_driver_keeps_is_not_said_to_be_off() -> None:
    driver = FakeNvml()
    power = GpuPower(("cuda:0", "cuda:1"), driver)
    power.set(200)
    driver.refuses.add((1, 310))
    with pytest.raises(MachineError, match="--gpu-power off: the driver refuses it"):
        power.set(None)
    assert (driver.watts[0], driver.watts[1]) == (200, 200)
    driver.refuses.clear()
    power.set(None)
    assert (driver.watts[0], driver.watts[1]) == (300, 310)


def test_a_driver_that_has_gone_remembers_no_limit() -> None:
    driver = FakeNvml()
    power = GpuPower(("cuda:0",), driver)
    power.set(200)
    driver.loaded = False
    power.restore()
    power.set(None)
    driver.loaded, driver.watts[0] = True, 300
    power.set(150)
    power.restore()
    assert driver.watts[0] == 300
