"""The screen that shows all limits of the node and takes new ones."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from spes_p2p.client.ui.panel import LIMIT_BAR, bar, fit
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.node.budgets.limits import OFF, parse_change
from spes_p2p.node.snapshot import LimitsView, LimitView

EXAMPLES = {
    "upload": "1MB/s",
    "download": "4MB/s",
    "monthly": "100GB",
    "hours": "22:00-07:00",
    "idle_only": "yes",
    "pause_on_battery": "yes",
    "gpu_share": "50%",
    "gpu_power": "200W",
}
"""Limit -> how it is written; the order of the fields."""
HINT_WIDTH = 33
_FLAG = re.compile(r"--([a-z-]+)")
_IS_A_FLAG = ("idle_only", "pause_on_battery")


class LimitField(Vertical):
    """One limit: its present value to be typed over, what is used of it, and a line for what it holds or is wrong."""

    def __init__(self, name: str, limit: LimitView | None) -> None:
        super().__init__(id=f"limit-{name}", classes="field")
        self.limit = name
        self._view = limit
        unset = "no" if name in _IS_A_FLAG else OFF
        self._before = unset if limit is None else limit.limit

    def compose(self) -> ComposeResult:
        """A row of three, and the line below it where there is something to say."""
        with Horizontal():
            yield Label(self.limit.replace("_", " "), classes="name", markup=False)
            yield Input(self._before, id=self.limit, compact=True)
            yield Label(fit(self._hint(), HINT_WIDTH), classes="hint", markup=False)
        yield Label("", classes="problem", markup=False)

    def on_mount(self) -> None:
        """What it holds is said at once."""
        self.tell(f"now: {self._view.holds}" if self._view is not None and self._view.holds else "")

    def _hint(self) -> str:
        if self._view is None:
            return "yes or no" if self.limit in _IS_A_FLAG else f"such as {EXAMPLES[self.limit]}"
        share = "" if self._view.share is None else f"{bar(self._view.share, LIMIT_BAR)} "
        return f"{share}{self._view.used}"

    def tell(self, text: str) -> None:
        """Show a text below the row; empty: take it away."""
        line = self.query_one(".problem", Label)
        line.update(text)
        line.display = bool(text)

    @property
    def change(self) -> str | None:
        """What was typed; None: it is as it was."""
        text = self.query_one(Input).value.strip()
        return None if text == self._before else text


class LimitsScreen(ModalScreen[None]):
    """Asks the node for the changes, and stays until it has made them or Esc is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close"),
        # before the fields get them, so that what is typed at once after them goes to the next field
        Binding("down", "app.focus_next", "next", show=False, priority=True),
        Binding("up", "app.focus_previous", "previous", show=False, priority=True),
    ]

    def __init__(self, limits: LimitsView, change: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        """`change`: ask the node, limit -> text; raises SpesError if it refuses or does not answer."""
        super().__init__()
        self._limits = limits
        self._change = change
        self._asking = False

    def compose(self) -> ComposeResult:
        """A field for each limit, how the line and the run go together, the keys; scrolls where it does not fit."""
        now = {limit.name: limit for limit in self._limits.limits}
        with VerticalScroll(classes="dialog", can_focus=False):
            yield Label("Limits of this node", classes="title")
            for name in EXAMPLES:
                yield LimitField(name, now.get(name))
            if self._limits.note:
                yield Label(self._limits.note, classes="note", markup=False)
            yield Label("", classes="problem general", markup=False)
            yield Label("Enter  change    Tab  next field    off  no such limit    Esc  close", classes="keys")

    def on_mount(self) -> None:
        """Nothing is wrong yet."""
        self._tell_general("")

    def on_input_submitted(self) -> None:
        """Enter in any field takes all of them, if all are right; the node is asked beside the screen."""
        fields = list(self.query(LimitField))
        changes = {field.limit: text for field in fields if (text := field.change) is not None}
        problems = {name: problem for name, text in changes.items() if (problem := _problem(name, text))}
        if self._asking:
            return
        self._show(problems)
        if not problems and not changes:
            self.dismiss()
        elif not problems:
            self._asking = True
            # of the app, not of this screen: Esc closes the screen, and what the node answers is told all the same
            self.app.run_worker(self._ask(changes), group="asking")

    async def _ask(self, changes: Mapping[str, str]) -> None:
        try:
            await self._change(changes)
        except SpesError as error:
            if self.is_current:
                self._show_refusal(str(error))
            else:
                self.app.notify(str(error), severity="error", markup=False)
        else:
            told = ", ".join(f"{name} {text}" for name, text in changes.items())
            self.app.notify(f"Limits changed: {told}.", markup=False)
            if self.is_current:
                self.dismiss()
        finally:
            self._asking = False

    def _show(self, problems: Mapping[str, str]) -> None:
        """At its field each, the first one focused."""
        self._tell_general("")
        for field in self.query(LimitField):
            field.tell(problems.get(field.limit, ""))
        for name in EXAMPLES:
            if name in problems:
                self.query_one(f"#{name}", Input).focus()
                return

    def _show_refusal(self, text: str) -> None:
        """At the field whose flag the node names first, else below all."""
        flag = _FLAG.search(text)
        name = flag[1].replace("-", "_") if flag is not None else ""
        if name in EXAMPLES:
            self._show({name: text})
        else:
            self._tell_general(text)

    def _tell_general(self, text: str) -> None:
        line = self.query_one(".general", Label)
        line.update(text)
        line.display = bool(text)

    def action_close(self) -> None:
        """Change nothing more."""
        self.dismiss()


def _problem(name: str, text: str) -> str:
    """What is wrong with a text, in the words of `spes-p2p limits`; empty: nothing."""
    try:
        parse_change(name, text)
    except ConfigError as error:
        return str(error)
    return ""
