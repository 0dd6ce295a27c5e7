"""The terminal UI's frame: feeds in, panels out, keys."""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.filter import NoColor
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Footer

from spes_p2p.client.ui.dialogs import HelpScreen, LeaveScreen, QuitScreen, Role
from spes_p2p.client.ui.experts_panel import ExpertsPanel
from spes_p2p.client.ui.feed import Feed
from spes_p2p.client.ui.learning_panel import LearningPanel
from spes_p2p.client.ui.limits_dialog import LimitsScreen
from spes_p2p.client.ui.log_panel import LEVEL_NAMES, LogPanel
from spes_p2p.client.ui.machine_panel import MachinePanel
from spes_p2p.client.ui.network_panel import NetworkPanel
from spes_p2p.client.ui.notice import Notice, is_users_pause, notice_texts
from spes_p2p.client.ui.round_panel import RoundPanel
from spes_p2p.client.ui.status_line import StatusLine
from spes_p2p.client.ui.themes import MONO, MONO_THEME, THEME_NAMES, first_theme, next_theme
from spes_p2p.client.ui.views import VIEWS, ViewName, ViewsLine, beside
from spes_p2p.errors import SpesError
from spes_p2p.node.snapshot import PAUSE, NodeSnapshot

RETRY_S = 0.5
"""Between attempts to reach a node that does not answer."""
TELL_S = 0.1
"""Between looks at what other threads have to tell."""
DRAW_S = 0.25
"""Between two snapshots that are shown: a person sees no difference, a slow machine does."""
NOTHING_YET = "The node has joined nothing yet, so there is nothing to"


class SwarmScreen(Screen[None]):
    """The screen below all dialogs: Tab goes through the views, not through widgets."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "app.beside(1)", "next view", show=False),
        Binding("shift+tab", "app.beside(-1)", "previous view", show=False),
    ]


class SwarmApp(App[str]):
    """Shows one node of `feeds` at a time.

    Returns `stop` if the user wants an end at once, `detach` if the node shall go on without the UI, else the empty
    text. Raises ConfigError for an unknown SPES_THEME.
    """

    CSS_PATH = "app.tcss"
    TITLE = "spes-p2p"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012  # declared by the base class
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-high")]  # noqa: RUF012  # declared by the base class
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause"),
        Binding("p", "resume", "resume"),
        Binding("l", "leave", "leave"),
        Binding("t", "limits", "limits"),
        Binding("d", "detach", "detach"),
        Binding("n", "other_peer(1)", "next peer"),
        Binding("b", "other_peer(-1)", "peer before", show=False),
        Binding("f", "log_level", "level"),
        Binding("slash", "search_log", "find", key_display="/"),
        Binding("c", "next_theme", "theme"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "ask_quit", "quit"),
        Binding("ctrl+c", "interrupt", "leave", show=False, priority=True),
        Binding("ctrl+q", "ask_quit", "quit", show=False, priority=True),
        *(Binding(str(number), f"view({number})", name, show=False) for number, name in enumerate(VIEWS, 1)),
    ]

    snapshot: reactive[NodeSnapshot | None] = reactive(None)
    view: reactive[ViewName] = reactive[ViewName]("overview")
    feed_name: reactive[str] = reactive("")
    problem: reactive[str] = reactive("")
    silent_s: reactive[int] = reactive(0)
    heard_at_s: reactive[float] = reactive(0.0)
    """Wall time of the node's last word."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        *,
        role: Role = "own",
        can_detach: bool = False,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`can_detach`: a node of one's own can go on without the UI. Closing an `attached` one ends nothing."""
        theme = first_theme(os.environ)
        super().__init__()
        self._feeds = tuple(feeds)
        self._role: Role = role
        self._can_detach = can_detach or role == "attached"
        self._now_s, self._wall_s = now_s, wall_s
        self._current = 0
        self._heard_mono_s = now_s()
        self._shown_at_s = float("-inf")
        self._newest: NodeSnapshot | None = None
        """Not shown yet."""
        self._leave_asked = False
        self._told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._no_colour = NoColor(enabled=False)
        # the last filter wins over what widgets and libraries colour by themselves; Textual has no public way to it
        self._filters.append(self._no_colour)
        self.register_theme(MONO_THEME)
        self._must_be_mono = bool(self.no_color)
        self._theme_name = ""
        self._set_theme(theme)

    def tell(self, text: str) -> None:
        """Show a line that comes from no node. May be called from any thread, at any time."""
        self._told.put(text)

    def end_from_thread(self) -> None:
        """End the UI. May be called from any thread, at any time."""
        self._told.put(None)

    # --- what is seen ------------------------------------------------------------------------------------------------

    def get_default_screen(self) -> Screen[None]:
        """Ours, for its keys."""
        return SwarmScreen(id="_default")

    def compose(self) -> ComposeResult:
        """The panels, each bound to the snapshot."""
        yield ViewsLine().data_bind(SwarmApp.view)
        with Container(id="panels", classes="overview"):
            yield RoundPanel().data_bind(SwarmApp.snapshot)
            yield ExpertsPanel().data_bind(SwarmApp.snapshot)
            yield LearningPanel().data_bind(SwarmApp.snapshot)
            yield NetworkPanel().data_bind(SwarmApp.snapshot)
            yield MachinePanel().data_bind(SwarmApp.snapshot)
            yield LogPanel()
        yield Notice().data_bind(SwarmApp.snapshot)
        yield StatusLine().data_bind(
            SwarmApp.snapshot, SwarmApp.feed_name, SwarmApp.problem, SwarmApp.silent_s, SwarmApp.heard_at_s
        )
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to follow the first feed."""
        self.set_interval(1.0, self._count_silence)
        self.set_interval(TELL_S, self._show_told)
        self.set_interval(DRAW_S, self._show_newest)
        self._follow()

    def watch_view(self, before: ViewName, view: ViewName) -> None:
        """The style shows what belongs to the view."""
        self.query("#panels").remove_class(before).add_class(view)
        self.refresh_bindings()

    def watch_snapshot(self, before: NodeSnapshot | None, snapshot: NodeSnapshot | None) -> None:
        """Keys depend on whether the node is paused, leaving or there at all; a notice takes room from the log."""
        self.query("#panels").set_class(snapshot is not None and bool(notice_texts(snapshot)), "-notice")
        if _key_facts(before) != _key_facts(snapshot):
            self.refresh_bindings()

    # --- feeds -------------------------------------------------------------------------------------------------------

    @work(exclusive=True, group="feed")
    async def _follow(self) -> None:
        """Read the current feed for ever, and again after a break."""
        feed = self._feeds[self._current]
        self.feed_name = feed.name
        self._heard()
        last_event, started_ms_ago = 0, 0
        while True:
            try:
                async for update in feed.updates(last_event):
                    self._heard()
                    if not isinstance(update, NodeSnapshot):
                        last_event = update.number
                        self.query_one(LogPanel).add(update)
                        continue
                    is_restarted, started_ms_ago = update.started_ms_ago < started_ms_ago, update.started_ms_ago
                    self._take(update)
                    if is_restarted:
                        last_event = 0  # another start counts its lines anew
                        break
            except SpesError as error:
                self.problem = str(error)
            if self._has_ended(feed):
                self.exit("")
                return
            await asyncio.sleep(RETRY_S)

    def _has_ended(self, feed: Feed) -> bool:
        """Whether there will be no more to see."""
        if self._role == "own":
            return feed.exit_code() is not None
        is_leaving = self._newest is not None and self._newest.leaving
        return self._role == "attached" and is_leaving and not feed.is_running()

    def _take(self, snapshot: NodeSnapshot) -> None:
        """Show it, at once if the last one is old enough."""
        self._newest = snapshot
        if self._now_s() - self._shown_at_s >= DRAW_S:
            self._show_newest()

    def _show_newest(self) -> None:
        if self._newest is not self.snapshot and self._newest is not None:
            self.snapshot = self._newest
            self._shown_at_s = self._now_s()

    def _heard(self) -> None:
        self._heard_mono_s = self._now_s()
        self.heard_at_s = self._wall_s()
        self.problem = ""
        self.silent_s = 0

    def _count_silence(self) -> None:
        self.silent_s = int(self._now_s() - self._heard_mono_s)

    def _show_told(self) -> None:
        while not self._told.empty():
            text = self._told.get()
            if text is None:
                self.exit("")
                return
            self.query_one(LogPanel).write(text)

    # --- keys: looking -----------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what makes sense here and now."""
        snapshot = self.snapshot
        paused, leaving = is_users_pause(snapshot), snapshot is not None and snapshot.leaving
        offered = {
            "pause": not paused and not leaving,
            "resume": paused and not leaving,
            "leave": self._role != "demo" and not leaving,
            "detach": self._can_detach,
            "other_peer": len(self._feeds) > 1,
            "log_level": self.view in ("overview", "log"),
            "search_log": self.view in ("overview", "log"),
            "next_theme": not self._must_be_mono,
        }
        return offered.get(action, True)

    def action_view(self, number: int) -> None:
        """Show one of the views."""
        self.view = VIEWS[number - 1]

    def action_beside(self, step: int) -> None:
        """Show the next view, or the one before."""
        self.view = beside(self.view, step)

    def action_other_peer(self, step: int) -> None:
        """Show another node."""
        self._current = (self._current + step) % len(self._feeds)
        self.snapshot = self._newest = None
        self._shown_at_s = float("-inf")
        self.query_one(LogPanel).clear()
        self._follow()

    def action_log_level(self) -> None:
        """Show fewer lines of the log, and all after the fewest."""
        panel = self.query_one(LogPanel)
        panel.next_level()
        self.notify(f"The log shows {LEVEL_NAMES[panel.level] or 'everything'}.", timeout=2)

    def action_search_log(self) -> None:
        """Ask for the text that the log's lines shall contain."""
        self.view = "log"
        self.query_one(LogPanel).begin_search()

    def action_next_theme(self) -> None:
        """Other colours, and none."""
        self._set_theme(next_theme(self._theme_name))
        self.notify(f"Colours: {self._theme_name}", timeout=2)

    def _set_theme(self, name: str) -> None:
        self._theme_name = name
        self._no_colour.enabled = name == MONO
        self.theme = THEME_NAMES[name]

    def action_help(self) -> None:
        """Say what everything means."""
        self.push_screen(HelpScreen(self._role, can_detach=self._can_detach))

    # --- keys: asking the node ---------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Hold training."""
        if self._is_there("pause"):
            self._ask(
                self._feeds[self._current].pause, "Pausing: the present step is finished, then nothing is trained."
            )

    def action_resume(self) -> None:
        """End the user's pause; what limits hold stays held."""
        pause = self.snapshot.pause if self.snapshot is not None else None
        still = ", ".join(reason for reason in pause.reasons if reason != PAUSE) if pause is not None else ""
        told = f"The pause is over; training is still held: {still}." if still else "Training goes on."
        self._ask(self._feeds[self._current].resume, told)

    def action_leave(self) -> None:
        """Leave properly, after a question, and go on showing until the node has ended."""
        snapshot = self.snapshot
        if snapshot is not None and self._is_there("leave"):
            self.push_screen(LeaveScreen(snapshot), lambda answer: self._leave() if answer else None)

    def _leave(self) -> None:
        self._leave_asked = True
        end = " Ctrl-C ends it now." if self._role == "own" else ""
        self._ask(self._feeds[self._current].leave, f"Leaving: the node ends when the others have taken over.{end}")

    def _is_there(self, wish: str) -> bool:
        if self.snapshot is not None:
            return True
        ends = " Ctrl-C ends it." if self._role == "own" else ""
        self.notify(f"{NOTHING_YET} {wish}.{ends}")
        return False

    @work(group="asking")
    async def _ask(self, request: Callable[[], Awaitable[None]], told: str) -> None:
        """A wish that the node has heard is told; a node that does not answer holds nothing up."""
        try:
            await request()
        except SpesError as error:
            self.notify(str(error), severity="error")
        else:
            self.notify(told)

    def action_limits(self) -> None:
        """Show the limits, and change them."""
        snapshot = self.snapshot
        if snapshot is not None and self._is_there("limit"):
            self.push_screen(LimitsScreen(snapshot.limits, self._feeds[self._current].change_limits))

    # --- keys: the end -----------------------------------------------------------------------------------------------

    async def action_interrupt(self) -> None:
        """Ctrl-C: once, leave properly; twice, or where there is nothing to leave, end now."""
        if self._role == "attached":
            self.exit("detach")
        elif self._role == "own" and not self._leave_asked and self.snapshot is not None:
            self._leave()
        else:
            self.exit("stop")

    def action_detach(self) -> None:
        """Close the UI; the node goes on."""
        self.exit("detach")

    def action_ask_quit(self) -> None:
        """Ask how to end; a UI that is only attached just ends."""
        if self._role == "attached":
            self.exit("detach")
        elif not isinstance(self.screen, QuitScreen):
            self.push_screen(QuitScreen(self._role, can_detach=self._can_detach), self._quit)

    def _quit(self, answer: str | None) -> None:
        if answer == "leave" and self._is_there("leave"):
            self._leave()
        elif answer in ("stop", "detach"):
            self.exit(answer)


def _key_facts(snapshot: NodeSnapshot | None) -> tuple[bool, bool] | None:
    return None if snapshot is None else (is_users_pause(snapshot), snapshot.leaving)
