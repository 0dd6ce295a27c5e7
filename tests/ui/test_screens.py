"""Whole screens, compared with the ones in `screens/`: every view, small and wide, in colour and without.

`SPES_WRITE_SCREENS=1 pytest tests/ui/test_screens.py` writes them anew; look at the difference before you commit it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from spes_p2p.client.ui.app import SwarmApp
from spes_p2p.client.ui.views import VIEWS
from spes_p2p.node.snapshot import (
    GpuView,
    LeaveStep,
    LeaveView,
    LimitsView,
    LimitView,
    LogEvent,
    NodeSnapshot,
    PauseView,
    UpdateView,
)
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot
from spes_p2p.testing.screens import FakeFeed, reads, screen_colours, screen_text, settle

FOLDER = Path(__file__).parent / "screens"
SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
EVENTS = (
    LogEvent(number=1, at_ms=1_000, level="info", text="starting"),
    LogEvent(number=2, at_ms=61_000, level="warning", text="round 5: went on without …DDDD0003"),
    LogEvent(number=3, at_ms=75_000, level="error", text="the trainer process died and is started again"),
)


def rich_snapshot() -> NodeSnapshot:
    """A node of which everything is known, with a limit, a co-owned shard, a kept part and a refused update."""
    snapshot = imagined_snapshot()
    replace = msgspec.structs.replace
    gpu = GpuView(
        number=0, name="Model 7", memory_bytes=9_000_000_000, memory_total_bytes=24_000_000_000, use_percent=87,
        temperature_c=64, power_w=211.5, power_limit_w=350.0,
    )  # fmt: skip
    machine = replace(snapshot.machine, gpus=(gpu,), battery_percent=81.0, on_battery=False, trainer_restarts=1)
    shared = replace(snapshot.shards[4], owners=(imagined_peer(0), imagined_peer(2)))
    verdicts = ("accepted", "accepted late", "refused: norm too large", "not included", "accepted")
    updates = tuple(UpdateView(round=number, verdict=text, tokens=40_960) for number, text in enumerate(verdicts, 2))
    upload = LimitView(name="upload", limit="1 MB/s", used="0.93 MB/s", share=0.93)
    monthly = LimitView(name="monthly", limit="100 GB", used="12.3 GB", share=0.123)
    hours = LimitView(name="hours", limit="22:00-07:00", used="")
    return replace(
        snapshot,
        round=replace(snapshot.round, last_kept_parts=1),
        shards=(*snapshot.shards[:4], shared, *snapshot.shards[5:]),
        learning=replace(snapshot.learning, updates=updates),
        machine=machine,
        limits=LimitsView(limits=(upload, monthly, hours), note="at this rate fewer shards are offered"),
    )


def leaving_snapshot() -> NodeSnapshot:
    steps = (
        LeaveStep(name="finish", text="this round's training ends and is published"),
        LeaveStep(name="successors", text="the new owners fetch what is handed over (0 of 2 have)"),
    )
    return msgspec.structs.replace(imagined_snapshot(), leaving=True, leave=LeaveView(steps=steps, safe_in_ms=40_000))


def paused_snapshot() -> NodeSnapshot:
    pause = PauseView(reasons=("pause", "on battery"), since_ms=125_000, reason="shard 0 stays its own for 9 rounds")
    return msgspec.structs.replace(imagined_snapshot(), paused=True, pause=pause)


async def compare(pilot: Pilot[str], name: str) -> None:
    """The screen becomes the stored one, or the difference is shown."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("SPES_WRITE_SCREENS"):
        await pilot.pause(1.0)
        path.parent.mkdir(exist_ok=True)
        path.write_text(screen_text(pilot.app) + "\n")
        return
    stored = path.read_text().removesuffix("\n")
    try:
        await settle(pilot, lambda: screen_text(pilot.app) == stored)
    except TimeoutError:
        found = screen_text(pilot.app)
        pytest.fail("\n".join(difflib.unified_diff(stored.split("\n"), found.split("\n"), name, "shown", lineterm="")))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["dark", "mono"])
async def test_every_view_is_as_stored(monkeypatch: pytest.MonkeyPatch, size: str, theme: str) -> None:
    monkeypatch.setenv("SPES_THEME", theme)
    app = SwarmApp([FakeFeed(rich_snapshot(), *EVENTS)], now_s=lambda: 0.0)
    async with app.run_test(size=SIZES[size]) as pilot:
        await reads(pilot, "Round 7", "trainer process died", "q quit")
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await compare(pilot, f"{view}-{size}")
            assert len(screen_colours(app)) == 0 if theme == "mono" else len(screen_colours(app)) > 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "snapshot"), [("leaving", leaving_snapshot()), ("paused", paused_snapshot())])
async def test_leave_and_pause_are_as_stored(size: str, name: str, snapshot: NodeSnapshot) -> None:
    app = SwarmApp([FakeFeed(snapshot, *EVENTS)], role="attached", now_s=lambda: 0.0)
    async with app.run_test(size=SIZES[size]) as pilot:
        await reads(pilot, "trainer process died", "q quit")
        await compare(pilot, f"{name}-{size}")


async def test_help_and_dialogs_are_as_stored() -> None:
    app = SwarmApp([FakeFeed(rich_snapshot(), *EVENTS)], can_detach=True, now_s=lambda: 0.0)
    async with app.run_test(size=SIZES["80x24"]) as pilot:
        await reads(pilot, "trainer process died", "d detach", "q quit")
        for key, name in (("question_mark", "help"), ("l", "leave"), ("q", "quit"), ("t", "limits")):
            await pilot.press(key)
            await compare(pilot, f"{name}-80x24")
            await pilot.press("escape")
            await reads(pilot, "Round 7 · 35 s left ────")


@pytest.mark.parametrize("size", SIZES)
async def test_limits_with_problems_are_as_stored(size: str) -> None:
    app = SwarmApp([FakeFeed(rich_snapshot(), *EVENTS)], now_s=lambda: 0.0)
    async with app.run_test(size=SIZES[size]) as pilot:
        await reads(pilot, "trainer process died", "q quit")
        await pilot.press("t", *"fast", "down", "down", *"9kB", "enter")
        await reads(pilot, "--monthly: '9kB' a month is too little")
        await compare(pilot, f"limits-wrong-{size}")
