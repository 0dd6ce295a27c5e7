"""What the terminal UI shows of a snapshot, and what its keys do."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from textual.pilot import Pilot

from spes_p2p.client.ui.app import SwarmApp
from spes_p2p.client.ui.dialogs import HelpScreen, QuitScreen
from spes_p2p.client.ui.learning_panel import whole_ticks
from spes_p2p.node.snapshot import LeaveStep, LeaveView, LogEvent, NodeSnapshot, RecoveryView, UpdateView
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot
from spes_p2p.testing.screens import FakeFeed, reads, screen_text, settle

SMALL, WIDE = (80, 24), (120, 40)
NOON_S = 1_700_000_000.0
ONE_LOOK = (
    "Round 7 · 35 s left",
    "▶train",
    "12/40 steps",
    "acknowledge",
    "adopt",
    "leader …BBBB0001  votes 1/3",
    "2 of 8 mine",
    "0*mine",
    "1 BBBB0001",
    "7 orphan",
    "3.200 nats/byte",
    "12,346 tok/s",
    "● me        voter  r6   shards 0,4",
    "● …BBBB0001 leader",
    "○ …DDDD0003 voter",
    "↑120.0 kB/s ↓340.0 kB/s",
    "round ↑1.2 MB ↓3.4 MB",
    "if I leave now: ",
    "1 Overview",
    "voter · round 6 certified · cpu 350.0 MB",
    "l leave",
    "q quit",
    "? help",
)


async def shown(pilot: Pilot[str], app: SwarmApp) -> None:
    await settle(pilot, lambda: app.snapshot is not None)


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_one_look_answers_everything(feed: FakeFeed, size: tuple[int, int]) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=size) as pilot:
        text = await reads(pilot, *ONE_LOOK)
    assert max(map(len, text.split("\n"))) <= size[0]


async def test_wide_screen_has_a_curve_for_the_run_too(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=WIDE) as pilot:
        await reads(pilot, "training, nats by step", "held-out, nats by round")


@pytest.mark.parametrize("size", [SMALL, WIDE])
@pytest.mark.parametrize("losses", [(5.6,), (5.6, 5.6), (5.6, float("nan")), (float("inf"),)])
async def test_curve_that_does_not_move_is_drawn(size: tuple[int, int], losses: tuple[float, ...]) -> None:
    """The first round is for claims: the held-out loss after it is the one before it, to the bit."""
    curve = tuple(enumerate(losses))
    snapshot = imagined_snapshot()
    learning = msgspec.structs.replace(snapshot.learning, loss_curve=curve, val_curve=curve)
    app = SwarmApp([FakeFeed(msgspec.structs.replace(snapshot, learning=learning))])
    async with app.run_test(size=size) as pilot:
        await shown(pilot, app)
        await reads(pilot, "Learning")


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_curve_is_drawn(feed: FakeFeed, size: tuple[int, int]) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=size) as pilot:
        await settle(pilot, lambda: sum(0x2801 <= ord(mark) < 0x2900 for mark in screen_text(app)) > 20)  # braille dots


@pytest.mark.parametrize(
    ("first", "last", "ticks"), [(0, 3, [0, 1, 2, 3]), (5, 5, [5]), (0, 240, [0, 60, 120, 180, 240]), (1, 2, [1, 2])]
)
def test_ticks_are_whole_numbers(first: int, last: int, ticks: list[int]) -> None:
    assert whole_ticks(first, last) == ticks


async def test_follows_the_snapshots(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        feed.show(imagined_snapshot(number=8, phase="vote"))
        await reads(pilot, "Round 8", "▶vote", "round 7 certified")


async def test_before_the_first_round_it_says_what_it_waits_for() -> None:
    snapshot = imagined_snapshot(phase="load")
    view = msgspec.structs.replace(
        snapshot.round, phases=(), waiting_for="the model (3 of 12 blobs)", leader="", votes_needed=0
    )
    feed = FakeFeed(msgspec.structs.replace(snapshot, round=view, member=False, voter=False))
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        waits = "joining · round 6 certified · waits for the model"
        await reads(pilot, "load: the model (3 of 12 blobs)", waits)


async def test_many_shards_and_peers_are_counted_where_they_do_not_fit() -> None:
    feed = FakeFeed(imagined_snapshot(num_peers=9, num_shards=64))
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "   30 ······*···", "if I leave now: 7 shards uncovered", "and 6 more peers")


async def test_co_owned_shard_shows_how_many_share_it() -> None:
    snapshot = imagined_snapshot()
    shared = msgspec.structs.replace(snapshot.shards[1], owners=(imagined_peer(1), imagined_peer(2)))
    feed = FakeFeed(msgspec.structs.replace(snapshot, shards=(snapshot.shards[0], shared)))
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "1 BBBB0001+1")


async def test_log_lines_are_shown_once_after_a_break() -> None:
    feed = FakeFeed(imagined_snapshot(), LogEvent(number=1, at_ms=61_000, level="warning", text="a word"))
    app = SwarmApp([feed])
    async with app.run_test(size=WIDE) as pilot:
        await reads(pilot, "1 min 01 s  warning: a word")
        feed.reachable.clear()
        feed.end(None)
        await settle(pilot, lambda: app.problem == "the node has gone")
        feed.reachable.set()
        await settle(pilot, lambda: app.problem == "")
        feed.show(imagined_snapshot(number=8))
        text = await reads(pilot, "Round 8")
    assert text.count("1 min 01 s  warning: a word") == 1


async def test_silent_node_is_said_so_and_its_last_state_stays(feed: FakeFeed) -> None:
    now_s = 100.0
    app = SwarmApp([feed], now_s=lambda: now_s, wall_s=lambda: NOON_S)
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        now_s += 12.9
        await reads(pilot, f"no answer since {time.strftime('%H:%M:%S', time.localtime(NOON_S))} (12 s)", "Round 7")


async def test_l_leaves_and_the_ui_stays_until_the_node_has_ended(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("l")
        await reads(pilot, "Leave the run properly?", "if I leave now: shards 0, 4 are uncovered")
        await pilot.press("l")
        await settle(pilot, lambda: feed.asked == ["leave"])
        assert app.is_running
        feed.end(0)
        await settle(pilot, lambda: app.return_value is not None)
    assert app.return_value == ""


async def test_interrupt_leaves_once_and_ends_the_second_time(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("ctrl+c")
        await settle(pilot, lambda: feed.asked == ["leave"])
        assert app.return_value is None
        await pilot.press("ctrl+c")
        await settle(pilot, lambda: app.return_value is not None)
    assert (feed.asked, app.return_value) == (["leave"], "stop")


async def test_before_the_node_has_begun_there_is_nothing_to_leave_and_an_interrupt_ends() -> None:
    feed = FakeFeed(LogEvent(number=1, at_ms=0, level="info", text="starting"))
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("l")
        await pilot.pause()
        assert (feed.asked, app.return_value) == ([], None)
        await pilot.press("ctrl+c")
        await settle(pilot, lambda: app.return_value is not None)
    assert (feed.asked, app.return_value) == ([], "stop")


@pytest.mark.parametrize(("key", "asked", "value"), [("l", ["leave"], None), ("e", [], "stop"), ("escape", [], None)])
async def test_quitting_asks_how(feed: FakeFeed, key: str, asked: list[str], value: str | None) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("q")
        await settle(pilot, lambda: isinstance(app.screen, QuitScreen))
        await pilot.press(key)
        await settle(pilot, lambda: app.return_value is not None or not isinstance(app.screen, QuitScreen))
        await settle(pilot, lambda: feed.asked == asked)
    assert app.return_value == value


async def test_help_explains_and_closes(feed: FakeFeed) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        await pilot.press("question_mark")
        await settle(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = await reads(pilot, "leave properly")
        await pilot.press("escape")
        await settle(pilot, lambda: not isinstance(app.screen, HelpScreen))
    assert "show another peer" not in text


async def test_n_and_b_switch_between_the_demos_peers() -> None:
    feeds = [FakeFeed(imagined_snapshot(number=number), name=f"peer {number}") for number in (1, 2, 3)]
    app = SwarmApp(feeds, role="demo")

    def round_is(number: int) -> Callable[[], bool]:
        return lambda: app.snapshot is not None and app.snapshot.round.number == number

    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot, round_is(1))
        await reads(pilot, "peer 1: ", "n next peer")
        for key, number in (("n", 2), ("n", 3), ("n", 1), ("b", 3)):
            await pilot.press(key)
            await settle(pilot, round_is(number))
            await reads(pilot, f"peer {number}: ")


async def test_demo_has_nothing_to_leave(feed: FakeFeed) -> None:
    app = SwarmApp([feed], role="demo")
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        assert "l leave" not in await reads(pilot, "q quit")
        await pilot.press("l", "q", "l")
        await settle(pilot, lambda: isinstance(app.screen, QuitScreen))
        await reads(pilot, "End the demo")
        await pilot.press("e")
        await settle(pilot, lambda: app.return_value is not None)
    assert (feed.asked, app.return_value) == ([], "stop")


async def test_lines_from_other_threads_are_shown_and_can_end_it(feed: FakeFeed) -> None:
    app = SwarmApp([feed], role="demo")
    app.tell("creating the run")
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot, lambda: "creating the run" in screen_text(app))
        app.end_from_thread()
        await settle(pilot, lambda: app.return_value is not None)
    assert app.return_value == ""


def test_snapshots_survive_the_wire() -> None:
    snapshot = imagined_snapshot()
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=NodeSnapshot) == snapshot


# --- a run in trouble ------------------------------------------------------------------------------------------------

REMEDY = "it is suspended; `kill -CONT 12345` lets it go on"
SUCCESSORS = "the new owners fetch what is handed over (0 of 2 have)"
WAITING = "2 of 4 voters heard, 3 needed"


def troubled_snapshot(*, waiting: str = WAITING) -> NodeSnapshot:
    keeps = (imagined_peer(0), imagined_peer(1))
    plan = RecoveryView(keeps=keeps, time_left_ms=500_000)
    return msgspec.structs.replace(imagined_snapshot(), final_round=4, waiting=waiting, recovery=plan)


@pytest.mark.parametrize("size", [SMALL, WIDE])
async def test_a_run_that_waits_on_purpose_says_so_and_why_and_nothing_of_it_is_cut_off(size: tuple[int, int]) -> None:
    app = SwarmApp([FakeFeed(troubled_snapshot(), name="peer 1")])
    async with app.run_test(size=size) as pilot:
        text = await reads(pilot, "Round 7 · waits on purpose", f"│ {WAITING}", "l leave")
    below = " ".join(below_the_panels(text))
    for words in (
        "round 6 tentative, round 4 final",
        f"waiting: on purpose: {WAITING}",
        "recovery: by itself in 8 min 20 s with 2 of 4 members, unsafe under partition",
    ):
        assert words in below, words


async def test_trouble_that_comes_and_goes_while_the_ui_runs_takes_its_lines_and_gives_them_back(
    feed: FakeFeed,
) -> None:
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "voter · round 6 certified")
        feed.show(troubled_snapshot())
        text = await reads(pilot, "unsafe under partition")
        assert len(below_the_panels(text)) == 4
        feed.show(imagined_snapshot())
        await settle(pilot, lambda: len(below_the_panels(screen_text(app))) == 2)


async def test_what_remains_of_a_leave_is_shown_whole_however_long_it_becomes() -> None:
    leaving = msgspec.structs.replace(imagined_snapshot(), leaving=True)
    steps = (LeaveStep(name="round", text="round 7 is being finished"), LeaveStep(name="successors", text=SUCCESSORS))
    feed = FakeFeed(leaving)
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "leaving: ")
        feed.show(msgspec.structs.replace(leaving, leave=LeaveView(steps=steps, safe_in_ms=40_000)))
        await settle(pilot, lambda: SUCCESSORS in " ".join(below_the_panels(screen_text(app))))


async def test_why_a_node_is_silent_and_what_helps_is_not_cut_off() -> None:
    feed = FakeFeed()
    feed.why_gone = (
        "the node in /home/somebody/.local/share/spes-p2p/default (process 12345) does not answer: " + REMEDY
    )
    app = SwarmApp([feed])
    async with app.run_test(size=SMALL) as pilot:
        await shown(pilot, app)
        feed.reachable.clear()
        feed.end(None)
        await settle(pilot, lambda: REMEDY in " ".join(below_the_panels(screen_text(app))))


def below_the_panels(text: str) -> list[str]:
    return [line.strip() for line in text.split("╯\n")[-1].split("\n")]


async def test_a_round_on_tentative_ones_is_not_called_tentative_itself() -> None:
    app = SwarmApp([FakeFeed(troubled_snapshot(waiting=""))])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "Round 7 · on tentative rounds", "Experts · 2 of 8 mine · tentative")


async def test_a_long_line_of_the_log_is_wrapped() -> None:
    words = "26 documents, 93,240 bytes of text to train on; 2 left out because they are in the held-out set"
    app = SwarmApp([FakeFeed(imagined_snapshot(), LogEvent(number=1, at_ms=7_000, level="info", text=words))])
    async with app.run_test(size=SMALL) as pilot:
        await settle(pilot, lambda: "7 s" in screen_text(app))
        text = screen_text(app)
    assert " ".join(text.replace("│", " ").split()).count(words) == 1


async def test_figures_that_do_not_fit_are_left_away_whole() -> None:
    snapshot = imagined_snapshot()
    updates = (UpdateView(round=126, verdict="accepted", tokens=1),)
    learning = msgspec.structs.replace(snapshot.learning, updates=updates)
    app = SwarmApp([FakeFeed(msgspec.structs.replace(snapshot, learning=learning))])
    async with app.run_test(size=SMALL) as pilot:
        await reads(pilot, "│ 3.200 nats/byte · r126 accepted      │", "│ 12,346 tok/s · ")
