"""The dialog of the limits: all eight of them, what is set now, and what is wrong with a new one said at its field."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from spes_p2p.client.ui.app import SwarmApp
from spes_p2p.client.ui.limits_dialog import EXAMPLES, LimitField, LimitsScreen
from spes_p2p.errors import ConfigError, MachineError, UnreachableError
from spes_p2p.node.budgets.limits import PARSERS, parse_change
from spes_p2p.node.snapshot import LimitsView, LimitView
from spes_p2p.testing.handle import imagined_snapshot
from spes_p2p.testing.screens import FakeFeed, reads, screen_text, settle

SMALL = (80, 24)
SET = LimitsView(
    limits=(
        LimitView(name="upload", limit="1 MB/s", used="0.93 MB/s", share=0.93),
        LimitView(name="hours", limit="22:00-07:00", used="12:00 now", holds="until 22:00: no training"),
        LimitView(name="idle_only", limit="yes", used="others use 0.1 cores"),
        LimitView(name="gpu_share", limit="50%", used="of the trainer's time"),
        LimitView(name="gpu_power", limit="200 W", used="set in the driver"),
    )
)


def app_with(feed: FakeFeed) -> SwarmApp:
    feed.show(msgspec.structs.replace(imagined_snapshot(), limits=SET))
    return SwarmApp([feed])


async def opened(pilot: Pilot[str], app: SwarmApp) -> None:
    await settle(pilot, lambda: app.snapshot is not None and app.snapshot.limits == SET)
    await pilot.press("t")
    await settle(pilot, lambda: isinstance(app.screen, LimitsScreen) and isinstance(app.focused, Input))


async def type_into(pilot: Pilot[str], app: SwarmApp, **texts: str) -> None:
    for name, text in texts.items():
        field = app.screen.query_one(f"#{name}", Input)
        field.focus()
        await settle(pilot, lambda field=field: app.focused is field)  # type: ignore[misc]  # mypy guesses no default
        await pilot.press(*keys(text))


def keys(text: str) -> Iterable[str]:
    """Typed over what is there, which is selected."""
    names = {"/": "slash", ":": "colon", "-": "minus", "%": "percent_sign", " ": "space"}
    return ["backspace"] if not text else [names.get(letter, letter) for letter in text]


def problems(app: SwarmApp) -> dict[str, str]:
    """Limit -> what the line below its field says."""
    lines = {field.limit: field.query_one(".problem") for field in app.screen.query(LimitField)}
    return {name: str(line.render()) for name, line in lines.items() if line.display}


def test_there_is_a_field_for_every_limit_and_its_example_is_right() -> None:
    assert set(EXAMPLES) == set(PARSERS)
    for name, example in EXAMPLES.items():
        assert parse_change(name, example)


async def test_t_shows_every_limit_with_its_present_value(feed: FakeFeed) -> None:
    app = app_with(feed)
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot, app)
        assert {field.id: field.value for field in app.screen.query(Input)} == {
            "upload": "1 MB/s",
            "download": "off",
            "monthly": "off",
            "hours": "22:00-07:00",
            "idle_only": "yes",
            "pause_on_battery": "no",
            "gpu_share": "50%",
            "gpu_power": "200 W",
        }
        await reads(
            pilot, "███████░ 0.93 MB/s", "others use 0.1 cores", "now: until 22:00: no training", "such as 4MB/s"
        )
        await reads(pilot, "Enter  change", "gpu power")  # all at once, without scrolling


async def test_enter_asks_for_what_was_typed_alone_and_closes(feed: FakeFeed) -> None:
    app = app_with(feed)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await opened(pilot, app)
        await pilot.press(*keys("2MB/s"), "tab", "down", *keys("9GB"), "up", "shift+tab")
        assert isinstance(app.focused, Input) and app.focused.id == "upload"
        await type_into(pilot, app, hours="off", pause_on_battery="yes", gpu_share="70%", gpu_power="150W")
        await pilot.press("enter")
        await settle(pilot, lambda: not isinstance(app.screen, LimitsScreen))
        changes = {
            "upload": "2MB/s", "monthly": "9GB", "hours": "off", "pause_on_battery": "yes", "gpu_share": "70%",
            "gpu_power": "150W",
        }  # fmt: skip
        assert feed.asked == [f"limits {changes}"]
        await reads(pilot, "Limits changed: upload 2MB/s, monthly 9GB")


@pytest.mark.parametrize("key", ["escape", "enter"])
async def test_nothing_typed_and_esc_ask_for_nothing(feed: FakeFeed, key: str) -> None:
    app = app_with(feed)
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot, app)
        if key == "escape":
            await type_into(pilot, app, upload="off")
        await pilot.press(key)
        await settle(pilot, lambda: not isinstance(app.screen, LimitsScreen))
    assert feed.asked == []


async def test_what_is_wrong_is_said_at_each_field_in_the_commands_words_and_nothing_is_asked(feed: FakeFeed) -> None:
    app = app_with(feed)
    wrong = {
        "upload": "8Mbit/s", "download": "fast", "monthly": "1MB", "hours": "25:00-07:00", "idle_only": "perhaps",
        "pause_on_battery": "", "gpu_share": "200%", "gpu_power": "lots",
    }  # fmt: skip
    words = {}
    for name, text in wrong.items():
        with pytest.raises(ConfigError) as told:
            parse_change(name, text)
        words[name] = str(told.value)
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot, app)
        await type_into(pilot, app, **wrong)
        await pilot.press("enter")
        await settle(pilot, lambda: problems(app) == words)
        assert isinstance(app.focused, Input) and app.focused.id == "upload"
        await reads(pilot, "--upload: '8Mbit/s' is in bits")
        for _ in EXAMPLES:  # more than fits: what is focused is scrolled to
            await pilot.press("down")
        await pilot.press("up")
        await reads(pilot, "--gpu-power: 'lots' is no power")
        # put right, they are asked for
        right = dict(EXAMPLES) | {"hours": "off", "idle_only": "no", "gpu_share": "70%"}
        await type_into(pilot, app, **right)
        await pilot.press("enter")
        await settle(pilot, lambda: not isinstance(app.screen, LimitsScreen))
    assert feed.asked == [f"limits {right}"]


async def test_what_the_node_refuses_is_said_at_the_field_it_names_or_below_all(feed: FakeFeed) -> None:
    app = app_with(feed)
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot, app)
        feed.refusal = MachineError("--gpu-power 300W: the driver lets only an administrator limit power\nAsk one.")
        await type_into(pilot, app, gpu_power="300W", download="4MB/s")
        await pilot.press("enter")
        await reads(pilot, "--gpu-power 300W: the driver lets only an", "Ask one.")
        assert set(problems(app)) == {"gpu_power"}
        assert isinstance(app.focused, Input) and app.focused.id == "gpu_power"
        feed.refusal = UnreachableError("the node does not answer")
        await pilot.press("enter")
        await reads(pilot, "the node does not answer")
        assert problems(app) == {}
        feed.refusal = None
        await pilot.press("enter")
        await settle(pilot, lambda: not isinstance(app.screen, LimitsScreen))
    assert feed.asked == ["limits {'download': '4MB/s', 'gpu_power': '300W'}"]


async def test_a_node_that_takes_its_time_is_asked_once_and_esc_waits_for_nobody(feed: FakeFeed) -> None:
    app = app_with(feed)
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await opened(pilot, app)
        feed.may_answer.clear()
        await type_into(pilot, app, upload="2MB/s")
        await pilot.press("enter", "enter", "escape")
        await settle(pilot, lambda: not isinstance(app.screen, LimitsScreen))
        assert "Limits changed" not in screen_text(app)
        feed.may_answer.set()
        await reads(pilot, "Limits changed: upload 2MB/s.")
    assert feed.asked == ["limits {'upload': '2MB/s'}"]
