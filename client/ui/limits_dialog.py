"""The screen that shows the limits of the traffic and takes new ones."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from spes_p2p.client.ui.panel import limit_lines
from spes_p2p.node.snapshot import LimitsView

FIELDS = {"upload": "such as 1MB/s", "download": "such as 4MB/s", "monthly": "such as 100GB"}
"""Limit -> how it is written."""
TEXT_WIDTH = 66


class LimitsScreen(ModalScreen[dict[str, str]]):
    """Answers with what was typed, limit -> text; empty: nothing changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close"),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "previous", show=False),
    ]

    def __init__(self, limits: LimitsView) -> None:
        super().__init__()
        self._limits = limits

    def compose(self) -> ComposeResult:
        """What is set, a field for each limit of the traffic, the keys."""
        now = {limit.name: limit.limit for limit in self._limits.limits}
        with Vertical(classes="dialog"):
            yield Label("Limits of this node", classes="title")
            for line in limit_lines(self._limits, frozenset(now), TEXT_WIDTH):
                yield Label(line)
            for name, example in FIELDS.items():
                with Horizontal(classes="field"):
                    yield Label(f"{name:<10}", markup=False)
                    yield Input(placeholder=f"now {now.get(name, 'off')}; {example}, or off", id=name, compact=True)
            yield Label("hours, idle only, battery, GPU: see `spes-p2p limits --help`", markup=False)
            yield Label("Enter  change    Tab  next field    Esc  close", classes="keys")

    def on_input_submitted(self) -> None:
        """Enter in any field takes all of them."""
        typed = {field.id: field.value.strip() for field in self.query(Input)}
        self.dismiss({name: text for name, text in typed.items() if name and text})

    def action_close(self) -> None:
        """Change nothing."""
        self.dismiss({})
