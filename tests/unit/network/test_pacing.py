"""The token bucket on a simulated clock, and who passes a gate first."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from spes_p2p.network.pacing import DEPTH_S, MAX_SLICE_BYTES, Bucket, Gate, Places

RATE = 1_000_000
WINDOW_S = 10.0


def most_in_any_window(passed: list[tuple[float, int]], window_s: float) -> int:
    """Most bytes of (when, bytes) within any window of this length."""
    most = total = begin = 0
    for at, num_bytes in passed:
        total += num_bytes
        while passed[begin][0] <= at - window_s:
            total -= passed[begin][1]
            begin += 1
        most = max(most, total)
    return most


@pytest.mark.parametrize("seed", range(8))
def test_no_ten_seconds_see_more_than_the_cap_and_a_twentieth_of_it(seed: int) -> None:
    random, now_s = Random(seed), 0.0
    bucket, passed = Bucket(RATE, 0.0), []
    while now_s < 60.0:
        # a loop that wakes late, pauses now and then, and has messages of up to 100 kB among the slices
        now_s += bucket.wait_s(now_s) + random.choice((0.0, 0.0, 0.0, 0.002, 0.05, 0.6 * (random.random() < 0.02)))
        size = random.choice((50_000, 50_000, 50_000, 300, random.randrange(100_000)))
        bucket.take(size, now_s)
        passed.append((now_s, size))
    most = most_in_any_window(passed, WINDOW_S)
    assert most <= RATE * WINDOW_S + RATE * DEPTH_S + 100_000
    assert most <= 1.05 * RATE * WINDOW_S


def test_a_loop_that_wakes_late_loses_nothing() -> None:
    bucket, now_s, sent = Bucket(RATE, 0.0), 0.0, 0
    while now_s < 30.0:
        now_s += bucket.wait_s(now_s) + 0.02
        bucket.take(50_000, now_s)
        sent += 50_000
    assert sent >= 0.98 * RATE * 30.0


def test_a_debt_is_paid_before_anything_passes_and_savings_have_an_end() -> None:
    bucket = Bucket(RATE, 0.0)
    bucket.take(int(RATE * (2.0 + DEPTH_S)), 0.0)
    assert bucket.wait_s(0.5) == pytest.approx(1.5)
    assert bucket.debt_bytes(0.5) == pytest.approx(1.5 * RATE)
    assert bucket.wait_s(1_000.0) == 0.0
    bucket.take(int(RATE * DEPTH_S) + RATE, 1_000.0)
    assert bucket.wait_s(1_000.0) == pytest.approx(1.0)


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(RATE, 5.0, debt_bytes=RATE)
    assert bucket.wait_s(5.0) == bucket.wait_s(4.0) == pytest.approx(1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def turns() -> None:
    """Let tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_messages_pass_before_blobs_that_came_earlier_each_in_order() -> None:
    clock = Clock()
    gate, order = Gate(clock), []
    gate.set_rate(RATE)
    gate.charge(RATE)  # in debt by 0.75 s

    async def go(name: str, *, message: bool) -> None:
        await (gate.message(100) if message else gate.blob(100))
        order.append(name)

    tasks = []
    for name, message in (("blob 1", False), ("blob 2", False), ("message 1", True), ("message 2", True)):
        tasks.append(asyncio.create_task(go(name, message=message)))
        await turns()
    assert order == []
    clock.now_s = 2.0
    gate.set_rate(RATE)  # looks again, as the timer does
    await asyncio.gather(*tasks)
    assert order == ["message 1", "message 2", "blob 1", "blob 2"]
    assert gate.num_bytes == RATE + 400


async def test_who_stops_waiting_takes_nothing() -> None:
    clock = Clock()
    gate = Gate(clock)
    gate.set_rate(RATE)
    gate.charge(RATE)
    gone = asyncio.create_task(gate.blob(RATE))
    stays = asyncio.create_task(gate.blob(5))
    await turns()
    gone.cancel()
    await turns()
    clock.now_s = 1.0
    gate.set_rate(RATE)
    await stays
    assert gate.num_bytes == RATE + 5


async def test_without_a_limit_all_pass_at_once_and_are_counted() -> None:
    gate = Gate()
    gate.set_rate(1)
    waiting = [asyncio.create_task(gate.blob(1_000_000)) for _ in range(3)]
    await turns()
    assert sum(task.done() for task in waiting) == 1
    gate.set_rate(None)
    await asyncio.gather(*waiting)
    await gate.message(7)
    assert (gate.num_bytes, gate.rate_bytes_per_s) == (3_000_007, None)


async def test_a_debt_outlives_a_change_of_the_rate() -> None:
    clock = Clock()
    gate = Gate(clock)
    gate.set_rate(RATE)
    gate.charge(2 * RATE)
    gate.set_rate(2 * RATE)
    waiting = asyncio.create_task(gate.blob(1))
    await turns()
    clock.now_s = 0.8
    gate.set_rate(RATE)
    await turns()
    assert not waiting.done()
    clock.now_s = 1.0
    gate.set_rate(2 * RATE)
    await waiting


async def test_the_real_timer_lets_the_next_one_pass() -> None:
    gate = Gate()
    gate.set_rate(RATE)
    gate.charge(int(0.3 * RATE))
    async with asyncio.timeout(30):
        await gate.blob(10)


def test_slices_are_short_and_whole_without_a_limit() -> None:
    gate = Gate()
    assert gate.slice_bytes(1 << 20) == 1 << 20
    gate.set_rate(RATE)
    assert gate.slice_bytes(1 << 20) == 50_000
    assert gate.slice_bytes(7) == 7
    gate.set_rate(1e9)
    assert gate.slice_bytes(1 << 20) == MAX_SLICE_BYTES


async def test_places_are_given_in_order_and_come_back() -> None:
    places, inside, leave = Places(1), [], asyncio.Event()

    async def stay(name: str) -> None:
        async with places:
            inside.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(stay(name)) for name in "abc"]
    await turns()
    assert inside == ["a"]
    places.set(2)
    await turns()
    assert inside == ["a", "b"]
    tasks[0].cancel()
    await turns()
    assert inside == ["a", "b", "c"]
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5), places, places:
        pass


async def test_a_place_given_to_one_who_is_cancelled_at_that_moment_is_free_again() -> None:
    places = Places(0)

    async def stay() -> None:
        async with places:
            raise AssertionError("cancelled before it got in")

    task = asyncio.create_task(stay())
    await turns()
    places.set(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), places:
        pass
