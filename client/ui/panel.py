"""What all panels have in common: a title, and a text that is a function of the snapshot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from spes_p2p.node.snapshot import LimitsView, NodeSnapshot

SEPARATOR = " · "
LIMIT_NAME = 16
LIMIT_BAR = 8
MOST_LINES = 3
"""Of the texts between the panels and the keys (app.tcss)."""


def fit_height(widget: Static, text: Content) -> None:
    """Lay the screen out anew if the widget, which is as high as its text, now needs more lines or fewer. Textual draws
    a changed text in the room of the one before, and to make room at every snapshot costs a quarter of drawing it."""
    width, height = widget.size
    if width and min(text.get_height({}, width), MOST_LINES) != height:
        widget.refresh(layout=True)


class Panel(Static):
    """Shows `draw(snapshot)`, and nothing before the first snapshot."""

    snapshot: reactive[NodeSnapshot | None] = reactive(None)

    def render(self) -> Content:
        """The panel's text at its present size."""
        if self.snapshot is None:
            return Content("")
        return Content("\n").join(self.draw(self.snapshot, self.size.width, self.size.height))

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """Lines for a panel of that many cells. Each panel says its own."""
        raise NotImplementedError


def limit_lines(limits: LimitsView, names: frozenset[str], width: int) -> list[Content]:
    """A line for each limit of these names that is set: how much of it is used, and what it holds now."""
    lines = []
    for limit in limits.limits:
        if limit.name not in names:
            continue
        share = "" if limit.share is None else f"{bar(limit.share, LIMIT_BAR)} "
        name = limit.name.replace("_", " ")
        text = (
            f"limit {name:<{LIMIT_NAME}} {share}{limit.used} of {limit.limit}"
            if limit.used
            else (f"limit {name:<{LIMIT_NAME}} {share}{limit.limit}")
        )
        held = f"; holds {limit.holds}" if limit.holds else ""
        lines.append(Content.styled(fit(text + held, width), "bold $text-warning" if limit.holds else ""))
    return lines


def bar(progress: float, width: int) -> str:
    """A progress bar of `width` cells; only a finished one is full."""
    filled = width if progress >= 1 else min(int(max(progress, 0.0) * width), width - 1)
    return "█" * filled + "░" * (width - filled)


def pack(parts: Sequence[str], width: int, height: int) -> list[str]:
    """Parts in at most `height` lines of `width` cells, each whole: half a figure is a wrong figure. The last are left
    away where there is no room; one that is longer than a line is cut."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(part) <= width:
            lines[-1] += SEPARATOR + part
        elif len(lines) < max(height, 1):
            lines.append(fit(part, width))
        else:
            break
    return lines


def lines_of(text: str, width: int) -> list[str]:
    """The text broken between words into lines of at most `width` cells."""
    return textwrap.wrap(text, max(width, 1))


def fit(text: str, width: int) -> str:
    """The text cut to `width` cells, with an ellipsis where it was cut."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
