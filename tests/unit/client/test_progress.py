"""A running node as plain lines, and what Ctrl-C means to it."""

from __future__ import annotations

import asyncio
import json
import logging

import msgspec
import pytest
import structlog

from spes_p2p.client import logs
from spes_p2p.client.progress import LOOK_EVERY_S, Progress
from spes_p2p.node.snapshot import LeaveStep, LeaveView, NodeSnapshot
from spes_p2p.testing.clock import VirtualClock
from spes_p2p.testing.handle import FakeHandle, imagined_snapshot


@pytest.fixture
def captured() -> structlog.testing.LogCapture:
    capture = structlog.testing.LogCapture()
    structlog.configure(processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    return capture


@pytest.fixture(autouse=True)
def unconfigured() -> None:
    structlog.reset_defaults()


async def test_each_phase_certificate_and_log_line_is_told_once(captured: structlog.testing.LogCapture) -> None:
    handle = FakeHandle(imagined_snapshot(number=7, phase="train"))
    progress = Progress(structlog.get_logger())
    progress.look(handle)
    progress.look(handle)
    await handle.show(imagined_snapshot(number=7, phase="vote"), log="a word")
    progress.look(handle)
    await handle.show(imagined_snapshot(number=8, phase="train"))
    progress.look(handle)
    progress.look(handle)
    assert [entry["event"] for entry in captured.entries] == [
        "round 7: train, 12/40 steps, leader …BBBB0001",
        "a word",
        "round 7: vote, leader …BBBB0001",
        "round 7 certified",
        "round 8: train, 12/40 steps, leader …BBBB0001",
    ]
    assert captured.entries[3]["val_loss"] == 2.8
    assert captured.entries[3]["shards"] == [0, 4]


async def test_a_newcomer_passes_old_certificates_in_silence(captured: structlog.testing.LogCapture) -> None:
    clock = VirtualClock()
    handle = FakeHandle(imagined_snapshot(number=1, phase="load"))
    progress = Progress(structlog.get_logger(), lambda seconds: clock.sleep_ms(round(1000 * seconds)))
    following = asyncio.create_task(progress.follow(handle))
    for number in range(2, 100):
        await asyncio.sleep(0)
        await handle.show(imagined_snapshot(number=number, phase="load"))
    clock.jump(round(1000 * LOOK_EVERY_S))
    while len(captured.entries) < 3:
        await asyncio.sleep(0)
    following.cancel()
    assert [entry["event"] for entry in captured.entries[-2:]] == [
        "round 98 certified",
        "round 99: load, leader …BBBB0001",
    ]
    assert len(captured.entries) == 3


async def test_following_wakes_for_a_change(captured: structlog.testing.LogCapture) -> None:
    handle = FakeHandle(imagined_snapshot(number=7))
    following = asyncio.create_task(Progress(structlog.get_logger()).follow(handle))
    while not captured.entries:
        await asyncio.sleep(0)
    await handle.show(msgspec.structs.replace(handle.snapshot(), leaving=True), log="leaving")
    while len(captured.entries) < 2:
        await asyncio.sleep(0)
    following.cancel()
    assert captured.entries[1]["event"] == "leaving"


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=True).warning("careful", round=3)
    line = json.loads(capsys.readouterr().out)
    assert (line["event"], line["level"], line["round"]) == ("careful", "warning", 3)
    assert line["timestamp"].endswith("Z")


def test_plain_lines_carry_no_colour_codes_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(as_json=False).info("hello")
    line = capsys.readouterr().out
    assert "hello" in line and "\x1b" not in line


async def test_what_remains_of_a_leave_is_told_at_each_step_and_every_ten_seconds(
    captured: structlog.testing.LogCapture,
) -> None:
    handle = FakeHandle()
    progress = Progress(structlog.get_logger())

    def leaving(safe_in_ms: int, *texts: str) -> NodeSnapshot:
        steps = tuple(LeaveStep(name="certificate", text=text) for text in texts)
        return msgspec.structs.replace(imagined_snapshot(), leave=LeaveView(steps=steps, safe_in_ms=safe_in_ms))

    for snapshot in (
        leaving(38_000, "a", "b"),
        leaving(31_000, "a", "b"),
        leaving(29_000, "a", "b"),
        leaving(28_000, "b"),
    ):
        await handle.show(snapshot)
        progress.look(handle)
    told = [entry["event"] for entry in captured.entries if "safe to close" in entry["event"]]
    assert told == [
        "safe to close in about 38 s; remains: a, then b",
        "safe to close in about 29 s; remains: a, then b",
        "safe to close in about 28 s; remains: b",
    ]
