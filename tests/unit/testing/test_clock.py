"""Clocks: the virtual one moves when told to, the real one never goes back."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.node.clock import MonotonicClock
from spes_p2p.ports import Clock
from spes_p2p.testing.clock import VirtualClock


@pytest.mark.parametrize("clock", [MonotonicClock(), VirtualClock(5)], ids=["monotonic", "virtual"])
def test_time_never_goes_back(clock: Clock) -> None:
    instants = [clock.now_ms() for _ in range(1000)]
    assert instants == sorted(instants)


def test_virtual_time_passes_only_by_jumps() -> None:
    clock = VirtualClock(100)
    assert clock.now_ms() == 100
    clock.jump(50)
    clock.jump_to(175)
    assert clock.now_ms() == 175


def test_a_jump_into_the_past_is_refused() -> None:
    clock = VirtualClock(100)
    for jump in (lambda: clock.jump(-1), lambda: clock.jump_to(99)):
        with pytest.raises(ValueError, match="cannot go back"):
            jump()
    assert clock.now_ms() == 100


async def test_sleepers_wake_in_the_order_of_their_instants() -> None:
    clock = VirtualClock()
    woken: list[str] = []

    async def sleeper(name: str, duration_ms: int) -> None:
        await clock.sleep_ms(duration_ms)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, duration_ms in (("late", 30), ("early", 10), ("early too", 10), ("at once", 0)):
            group.create_task(sleeper(name, duration_ms))
        while clock.next_wake_ms() != 10 or not woken:
            await asyncio.sleep(0)
        assert woken == ["at once"]
        clock.jump(29)
        clock.jump(1)
    assert woken == ["at once", "early", "early too", "late"]
    assert clock.next_wake_ms() is None


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep_ms(10))
    while clock.next_wake_ms() is None:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert clock.next_wake_ms() is None
    clock.jump(20)
