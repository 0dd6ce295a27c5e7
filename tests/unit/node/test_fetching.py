"""Fetches that end when they are no longer wanted, and the line that is too slow."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.errors import MachineError
from spes_p2p.node.fetching import LineWatch, all_unless
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.clock import VirtualClock


async def come(value: bool) -> bool:
    await asyncio.sleep(0)
    return value


async def never() -> bool:
    await asyncio.Event().wait()
    return True


async def fail() -> bool:
    raise MachineError("disk full")


async def test_all_must_come_true() -> None:
    assert await all_unless(asyncio.Event(), [come(True), come(True)])
    assert not await all_unless(asyncio.Event(), [come(True), come(False)])
    assert await all_unless(asyncio.Event(), [])


async def test_event_ends_what_still_runs() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    assert not await all_unless(event, [come(True), never()])
    assert len(asyncio.all_tasks()) == 1


async def test_failure_ends_the_others_and_is_raised() -> None:
    with pytest.raises(MachineError, match="disk full"):
        await all_unless(asyncio.Event(), [never(), fail()])
    assert len(asyncio.all_tasks()) == 1


HEAD = cases.owned_head(cases.identities(3))
RESEND_MS = HEAD.run.config.protocol.resend_ms


def watch() -> tuple[VirtualClock, list[str], LineWatch]:
    clock, notes = VirtualClock(), []
    return clock, notes, LineWatch(clock, lambda level, text: notes.append(text))


def test_line_that_lets_two_rounds_pass_is_told_which_rate_would_do() -> None:
    clock, notes, line = watch()
    line.adopted(HEAD, loading=False)
    for _ in range(2):
        clock.jump(10_000)
        line.adopted(HEAD, loading=True)
    # 4 parts of 40,000 bytes and 8 blobs of 100,000 within 10 s
    assert len(notes) == 1
    assert "96.0 kB/s would do (960.0 kB within 10 s)" in notes[0]


def test_line_that_keeps_up_is_left_in_peace() -> None:
    clock, notes, line = watch()
    for _ in range(5):
        clock.jump(10_000)
        line.adopted(HEAD, loading=True)
        line.loaded()
    assert notes == []


def test_certificates_in_quick_succession_are_a_node_that_catches_up() -> None:
    clock, notes, line = watch()
    for _ in range(20):
        clock.jump(RESEND_MS - 1)
        line.adopted(HEAD, loading=True)
    assert notes == []
