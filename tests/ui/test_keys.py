"""Every key of the terminal UI, and that it is offered only where it makes sense."""

from __future__ import annotations

import msgspec
import pytest
from textual.pilot import Pilot

from spes_p2p.client.ui.app import SwarmApp
from spes_p2p.client.ui.dialogs import HelpScreen, LeaveScreen, QuitScreen
from spes_p2p.client.ui.log_panel import LogLines, SearchInput
from spes_p2p.client.ui.themes import THEME_NAMES
from spes_p2p.client.ui.views import VIEWS
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot, PauseView
from spes_p2p.testing.handle import imagined_snapshot
from spes_p2p.testing.screens import FakeFeed, reads, screen_text, settle

SMALL = (80, 24)
TITLES = ("Round 7 ·", "Experts ·", "─ Learning ─", "Network ·", "Machine ·", "─ Log ")
"""Of the panels, in the order of the views after the overview."""


def paused(snapshot: NodeSnapshot | None = None) -> NodeSnapshot:
    pause = PauseView(reasons=("pause",), since_ms=65_000, reason="its shards 0, 4 stay its own")
    return msgspec.structs.replace(snapshot or imagined_snapshot(), paused=True, pause=pause)


async def shown(pilot: Pilot[str], app: SwarmApp) -> None:
    await settle(pilot, lambda: app.snapshot is not None)
    await reads(pilot, "q quit")


async def test_number_keys_show_one_panel_with_all_the_room_and_1_shows_all(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        for place, title in enumerate(TITLES):
            await pilot.press(str(place + 2))
            await settle(pilot, lambda title=title: [one for one in TITLES if one in screen_text(app)] == [title])  # type: ignore[misc]  # mypy guesses no default
            assert app.view == VIEWS[place + 1]
        await pilot.press("1")
        await reads(pilot, *TITLES[:4], TITLES[5])


async def test_tab_goes_through_the_views_and_back(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        seen = []
        for _ in range(len(VIEWS)):
            await pilot.press("tab")
            seen.append(app.view)
        assert seen == [*VIEWS[1:], VIEWS[0]]
        await pilot.press("shift+tab")
        assert app.view == VIEWS[-1]


async def test_p_pauses_and_then_resumes(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await reads(pilot, "p pause")
        await pilot.press("p")
        await settle(pilot, lambda: feed.asked == ["pause"])
        feed.show(paused())
        await reads(pilot, "p resume", "paused for 1 min 05 s (you paused it): its shards 0, 4 stay its own")
        await pilot.press("p")
        await settle(pilot, lambda: feed.asked == ["pause", "resume"])
        feed.show(imagined_snapshot())
        assert "paused for" not in await reads(pilot, "p pause")


def held_by_limits(*others: str) -> NodeSnapshot:
    pause = PauseView(reasons=(*others, "it is outside the hours 22:00-07:00"), since_ms=65_000)
    return msgspec.structs.replace(imagined_snapshot(), paused=True, pause=pause)


async def test_p_resumes_only_what_the_user_paused(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        feed.show(held_by_limits())
        await reads(pilot, "p pause", "(it is outside the hours 22:00-07:00)")
        await pilot.press("p")
        await settle(pilot, lambda: feed.asked == ["pause"])
        feed.show(held_by_limits("pause"))
        await reads(pilot, "p resume", "you paused it, it is outside the hours")
        await pilot.press("p")
        await settle(pilot, lambda: feed.asked == ["pause", "resume"])
        await settle(pilot, lambda: any("still held: it is outside" in one.message for one in app._notifications))


@pytest.mark.parametrize(
    ("key", "asked"), [("l", ["leave"]), ("enter", ["leave"]), ("escape", []), ("c", []), ("q", [])]
)
async def test_l_asks_before_it_leaves(feed: FakeFeed, key: str, asked: list[str]) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("l")
        await settle(pilot, lambda: isinstance(app.screen, LeaveScreen))
        await pilot.press(key)
        await settle(pilot, lambda: not isinstance(app.screen, LeaveScreen) and feed.asked == asked)
        if asked:
            feed.show(msgspec.structs.replace(imagined_snapshot(), leaving=True))
            await settle(pilot, lambda: "l leave" not in screen_text(app))
    assert feed.asked == asked


async def test_what_a_node_does_not_answer_is_told_and_holds_nothing_up(feed: FakeFeed) -> None:
    feed.answers = False
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await shown(pilot, app)
        await pilot.press("p")
        await reads(pilot, "the node does not answer")
        await pilot.press("2")
        await settle(pilot, lambda: app.view == "round")


async def test_f_and_slash_filter_the_log() -> None:
    lines = [("info", "round 3 began"), ("warning", "a peer is late"), ("error", "the disk is full")]
    events = [
        LogEvent(number=number, at_ms=1000, level=level, text=text)  # type: ignore[arg-type]  # of the three levels
        for number, (level, text) in enumerate(lines, 1)
    ]
    feed = FakeFeed(imagined_snapshot(), *events)
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, *(text for _, text in lines))
        await pilot.press("f")
        assert "round 3 began" not in await reads(pilot, "Log · warnings and errors · 2 of 3 lines", "late", "full")
        await pilot.press("f")
        assert "late" not in await reads(pilot, "Log · errors only · 1 of 3 lines", "error: the disk is full")
        await pilot.press("f")
        await reads(pilot, "─ Log ─", "round 3 began")
        await pilot.press("slash", *"LATE")
        assert "round 3 began" not in await reads(pilot, "Log · with 'LATE' · 1 of 3 lines", "a peer is late")
        assert app.view == "log"
        await pilot.press("enter")
        assert isinstance(app.focused, LogLines)
        feed.show(LogEvent(number=4, at_ms=2000, level="info", text="another one is late"))
        feed.show(LogEvent(number=5, at_ms=2000, level="info", text="round 4 began"))
        assert "round 4" not in await reads(pilot, "2 of 5 lines", "another one is late")
        await pilot.press("slash", "escape")
        await reads(pilot, "─ Log ─", "round 3 began", "round 4 began")
        assert not app.query_one(SearchInput).display


async def test_arrows_scroll_the_log() -> None:
    events = [LogEvent(number=number, at_ms=0, level="info", text=f"line {number}.") for number in range(1, 61)]
    app = SwarmApp([FakeFeed(imagined_snapshot(), *events)])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("7")
        await reads(pilot, "line 60.")
        await pilot.press("home")
        assert "line 60." not in await reads(pilot, "line 1.")
        await pilot.press("end")
        await reads(pilot, "line 60.")


async def test_log_is_wrapped_anew_when_the_terminal_changes() -> None:
    words = " ".join(f"word{number}" for number in range(20))
    app = SwarmApp([FakeFeed(imagined_snapshot(), LogEvent(number=1, at_ms=0, level="info", text=words))])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("7")
        await reads(pilot, "word9")
        await pilot.resize_terminal(160, 24)
        await reads(pilot, " ".join(words.split()[:19]))


async def test_c_goes_through_the_themes_and_round(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        seen = []
        for _ in THEME_NAMES:
            await pilot.press("c")
            seen.append(app.theme)
    names = list(THEME_NAMES.values())
    assert seen == [*names[1:], names[0]]


@pytest.mark.parametrize("key", ["escape", "q", "question_mark", "enter"])
async def test_question_mark_explains_every_key_that_is_offered(feed: FakeFeed, key: str) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=(80, 40)) as pilot:
        await shown(pilot, app)
        offered = [found.binding.key_display or found.binding.key for found in app.active_bindings.values()]
        await pilot.press("question_mark")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = await reads(pilot, "1-7, Tab", "Ctrl-C")
        for name in offered:
            if len(name) == 1 and not name.isdigit():
                assert f" {name} " in text, name
        await pilot.press(key)
        await settle(pilot, lambda: not isinstance(app.screen, HelpScreen))


@pytest.mark.parametrize("key", ["d", "q", "ctrl+c", "ctrl+q"])
async def test_attached_ui_ends_without_a_question_and_the_node_goes_on(feed: FakeFeed, key: str) -> None:
    app = SwarmApp([feed], role="attached")
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await reads(pilot, "d detach")
        await pilot.press(key)
        await settle(pilot, lambda: app.return_value is not None)
    assert (feed.asked, app.return_value) == ([], "detach")


async def test_attached_ui_ends_when_the_node_has_left(feed: FakeFeed) -> None:
    app = SwarmApp([feed], role="attached")
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("l", "l")
        feed.show(msgspec.structs.replace(imagined_snapshot(), leaving=True))
        await settle(pilot, lambda: app.snapshot is not None and app.snapshot.leaving)
        feed.reachable.clear()
        feed.end(0)
        await settle(pilot, lambda: app.return_value is not None)
    assert app.return_value == ""


async def test_attached_ui_stays_with_a_node_that_falls_silent_while_it_leaves(feed: FakeFeed) -> None:
    app = SwarmApp([feed], role="attached")
    leaving = msgspec.structs.replace(imagined_snapshot(), leaving=True)
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        feed.show(leaving)
        await reads(pilot, "leaving: ")
        feed.end(None, leaving)
        await reads(pilot, "no answer since")
        feed.show(msgspec.structs.replace(imagined_snapshot(number=8), leaving=True))
        await reads(pilot, "Round 8")
        assert app.return_value is None


async def test_attached_ui_waits_for_a_node_that_is_started_again_and_shows_its_log_from_the_beginning() -> None:
    feed = FakeFeed(imagined_snapshot(), LogEvent(number=9, at_ms=0, level="info", text="before"))
    app = SwarmApp([feed], role="attached")
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "before")
        again = msgspec.structs.replace(imagined_snapshot(), started_ms_ago=10)
        feed.end(None, again, LogEvent(number=1, at_ms=0, level="info", text="first line of another start"))
        await reads(pilot, "first line of another start")
        assert app.return_value is None


@pytest.mark.parametrize("can_detach", [True, False])
async def test_own_node_goes_on_without_the_ui_only_where_that_can_be(feed: FakeFeed, can_detach: bool) -> None:
    app = SwarmApp([feed], can_detach=can_detach)
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        assert ("d detach" in screen_text(app)) == can_detach
        await pilot.press("q")
        await settle(pilot, lambda: isinstance(app.screen, QuitScreen))
        await pilot.press("d")
        await pilot.pause()
        assert app.return_value == ("detach" if can_detach else None)


async def test_before_the_node_has_begun_keys_say_that_there_is_nothing() -> None:
    app = SwarmApp([FakeFeed(LogEvent(number=1, at_ms=0, level="info", text="starting"))])
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await reads(pilot, "starting")
        await pilot.press("p")
        await reads(pilot, "The node has joined nothing yet")
        await pilot.press("t", "3")
        await settle(pilot, lambda: app.view == "experts")
