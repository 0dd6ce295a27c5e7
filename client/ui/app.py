"""The terminal UI's frame: feeds in, panels out, keys."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.reactive import reactive
from textual.widgets import Footer

from spes_p2p.client.ui.dialogs import HelpScreen, QuitScreen
from spes_p2p.client.ui.experts_panel import ExpertsPanel
from spes_p2p.client.ui.feed import Feed
from spes_p2p.client.ui.learning_panel import LearningPanel
from spes_p2p.client.ui.log_panel import LogPanel
from spes_p2p.client.ui.peers_panel import PeersPanel
from spes_p2p.client.ui.round_panel import RoundPanel
from spes_p2p.client.ui.status_line import StatusLine
from spes_p2p.errors import SpesError
from spes_p2p.node.snapshot import NodeSnapshot

RETRY_S = 0.5
"""Between attempts to reach a node that does not answer."""
TELL_S = 0.1
"""Between looks at what other threads have to tell."""


class SwarmApp(App[str]):
    """Shows one node of `feeds` at a time. Returns `stop` if the user wants an end at once, `detach` if the node shall
    go on without the UI, else the empty text."""

    CSS_PATH = "app.tcss"
    TITLE = "spes-p2p"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012  # declared by the base class
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "leave", "leave"),
        Binding("d", "detach", "detach"),
        Binding("q", "ask_quit", "quit"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("ctrl+c", "interrupt", "leave", show=False, priority=True),
        Binding("ctrl+q", "ask_quit", "quit", show=False, priority=True),
        *(Binding(str(number), f"show({number})", f"peer {number}", show=False) for number in range(1, 10)),
    ]

    snapshot: reactive[NodeSnapshot | None] = reactive(None)
    feed_name: reactive[str] = reactive("")
    problem: reactive[str] = reactive("")
    silent_s: reactive[int] = reactive(0)

    def __init__(
        self,
        feeds: Sequence[Feed],
        *,
        can_leave: bool = True,
        role: Literal["own", "attached"] = "own",
        can_detach: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`can_detach`: a node of one's own can go on without the UI. Closing an `attached` one ends nothing."""
        super().__init__()
        self._feeds = tuple(feeds)
        self._can_leave = can_leave
        self._role = role
        self._can_detach = can_detach or role == "attached"
        self._now_s = now_s
        self._current = 0
        self._heard_at_s = now_s()
        self._leave_asked = False
        self._told: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def tell(self, text: str) -> None:
        """Show a line that comes from no node. May be called from any thread, at any time."""
        self._told.put(text)

    def end_from_thread(self) -> None:
        """End the UI. May be called from any thread, at any time."""
        self._told.put(None)

    def compose(self) -> ComposeResult:
        """The panels, each bound to the snapshot."""
        with Container(id="panels"):
            yield RoundPanel().data_bind(SwarmApp.snapshot)
            yield ExpertsPanel().data_bind(SwarmApp.snapshot)
            yield LearningPanel().data_bind(SwarmApp.snapshot)
            yield PeersPanel().data_bind(SwarmApp.snapshot)
        yield LogPanel()
        yield StatusLine().data_bind(SwarmApp.snapshot, SwarmApp.feed_name, SwarmApp.problem, SwarmApp.silent_s)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to follow the first feed."""
        self.set_interval(1.0, self._count_silence)
        self.set_interval(TELL_S, self._show_told)
        self._follow()

    @work(exclusive=True, group="feed")
    async def _follow(self) -> None:
        """Read the current feed for ever, and again after a break."""
        feed = self._feeds[self._current]
        self.feed_name = feed.name
        self._heard()
        last_event = 0
        while True:
            try:
                async for update in feed.updates(last_event):
                    self._heard()
                    if isinstance(update, NodeSnapshot):
                        self.snapshot = update
                    else:
                        last_event = update.number
                        self.query_one(LogPanel).add(update)
            except SpesError as error:
                self.problem = str(error)
            if feed.exit_code() is not None and self._can_leave:
                self.exit("")
                return
            await asyncio.sleep(RETRY_S)

    def _heard(self) -> None:
        self._heard_at_s = self._now_s()
        self.problem = ""
        self.silent_s = 0

    def _count_silence(self) -> None:
        self.silent_s = int(self._now_s() - self._heard_at_s)

    def _show_told(self) -> None:
        while not self._told.empty():
            text = self._told.get()
            if text is None:
                self.exit("")
                return
            self.query_one(LogPanel).write(text)

    def action_show(self, number: int) -> None:
        """Show another node."""
        if number > len(self._feeds) or number - 1 == self._current:
            return
        self._current = number - 1
        self.snapshot = None
        self.query_one(LogPanel).clear()
        self._follow()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what makes sense here."""
        if action == "leave":
            return self._can_leave
        if action == "detach":
            return self._can_detach
        return True

    async def action_leave(self) -> None:
        """Leave properly, and go on showing until the node has ended."""
        if self.snapshot is None:
            self.notify("The node has joined nothing yet, so there is nothing to leave. Ctrl-C ends it.")
            return
        self._leave_asked = True
        self.notify("Leaving properly: the node ends when the others have taken over. Ctrl-C ends it now.")
        self._ask_to_leave()

    @work(group="leave")
    async def _ask_to_leave(self) -> None:
        try:
            await self._feeds[self._current].leave()
        except SpesError as error:
            self.notify(str(error), severity="error")

    async def action_interrupt(self) -> None:
        """Ctrl-C: once, leave properly; twice, or where there is nothing to leave, end now."""
        if self._role == "attached":
            self.exit("detach")
        elif self._can_leave and not self._leave_asked and self.snapshot is not None:
            await self.action_leave()
        else:
            self.exit("stop")

    def action_detach(self) -> None:
        """Close the UI; the node goes on."""
        self.exit("detach")

    def action_ask_quit(self) -> None:
        """Ask how to end."""
        if self._role == "attached":
            self.exit("detach")
        elif not isinstance(self.screen, QuitScreen):
            self.push_screen(QuitScreen(can_leave=self._can_leave), self._quit)

    async def _quit(self, answer: str | None) -> None:
        if answer == "leave":
            await self.action_leave()
        elif answer == "stop":
            self.exit("stop")

    def action_help(self) -> None:
        """Say what everything means."""
        self.push_screen(HelpScreen(many=len(self._feeds) > 1))
