"""The node's log, and what of it is shown."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive
from textual.widgets import Input, RichLog

from spes_p2p.client.output import duration_text
from spes_p2p.client.ui.panel import SEPARATOR
from spes_p2p.client.ui.themes import MONO
from spes_p2p.node.snapshot import LogEvent

MAX_LINES = 1000
Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
LEVEL_NAMES: dict[Level, str] = {"info": "", "warning": "warnings and errors", "error": "errors only"}
STYLES: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}
MONO_STYLES: dict[Level, str] = {"info": "", "warning": "bold", "error": "bold reverse"}


@dataclass(frozen=True, slots=True)
class _Line:
    level: Level
    text: str


class LogLines(RichLog):
    """Lines that are wrapped anew when the width changes."""

    def __init__(self) -> None:
        super().__init__(max_lines=MAX_LINES, wrap=True, markup=False, min_width=20)
        self._width = 0

    def on_resize(self, event: events.Resize) -> None:
        """Draw again for the new width."""
        if event.size.width != self._width and isinstance(self.parent, LogPanel):
            self.call_after_refresh(self.parent.draw_again)
        self._width = event.size.width


class SearchInput(Input):
    """Where the text to look for is typed. Enter keeps it, Escape forgets it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "forget", "forget", show=False)]

    def action_forget(self) -> None:
        """Show everything again."""
        self.value = ""
        if isinstance(self.parent, LogPanel):
            self.parent.end_search()


class LogPanel(Vertical):
    """The latest lines that pass the filters; scrolls when it has the focus."""

    level: reactive[Level] = reactive[Level]("info")
    """The least level that is shown."""
    sought: reactive[str] = reactive("")
    """Text that shown lines contain, whatever its case; empty: all."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[_Line] = deque(maxlen=MAX_LINES)

    def compose(self) -> ComposeResult:
        """Lines, and the search below them while it is asked for."""
        yield LogLines()
        search = SearchInput(placeholder="text to look for", compact=True)
        search.display = False
        yield search

    def on_mount(self) -> None:
        """The title tells the filters; lines have the theme's colours."""
        self.watch(self.app, "theme", self.draw_again, init=False)
        self._tell_filters()

    def add(self, event: LogEvent) -> None:
        """Append one line of the node's log."""
        level = "" if event.level == "info" else f"{event.level}: "
        self._append(_Line(event.level, f"{duration_text(event.at_ms):>12}  {level}{event.text}"))

    def write(self, text: str) -> None:
        """Append a line that comes from no node."""
        self._append(_Line("info", text))

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()
        self.draw_again()

    def next_level(self) -> None:
        """Show fewer levels, and all after the fewest."""
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]

    def begin_search(self) -> None:
        """Ask for the text to look for."""
        search = self.query_one(SearchInput)
        search.display = True
        search.focus()

    def end_search(self) -> None:
        """Back to the lines."""
        search = self.query_one(SearchInput)
        search.display = bool(search.value)
        self.query_one(LogLines).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as the text is typed."""
        event.stop()
        self.sought = event.value

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        event.stop()
        self.end_search()

    def watch_level(self) -> None:
        """Another level."""
        self.draw_again()

    def watch_sought(self) -> None:
        """Another text."""
        self.draw_again()

    def draw_again(self, *_: object) -> None:
        """All lines that pass, from the beginning."""
        if not self.is_mounted:
            return
        lines = self.query_one(LogLines)
        lines.clear()
        for line in self._lines:
            if self._passes(line):
                self._show(line)
        self._tell_filters()

    def _append(self, line: _Line) -> None:
        self._lines.append(line)
        if self._passes(line):
            self._show(line)
        self._tell_filters()

    def _passes(self, line: _Line) -> bool:
        return LEVELS.index(line.level) >= LEVELS.index(self.level) and self.sought.lower() in line.text.lower()

    def _show(self, line: _Line) -> None:
        lines = self.query_one(LogLines)
        styles = MONO_STYLES if self.app.theme == MONO else STYLES
        # by itself it would take the width that the terminal had at the start
        lines.write(Text(line.text, styles[line.level]), width=lines.scrollable_content_region.width or None)

    def _tell_filters(self) -> None:
        parts = ["Log"]
        if self.level != "info":
            parts.append(LEVEL_NAMES[self.level])
        if self.sought:
            parts.append(f"with {self.sought!r}")
        if len(parts) > 1:
            shown = sum(map(self._passes, self._lines))
            parts.append(f"{shown} of {len(self._lines)} lines")
        self.border_title = SEPARATOR.join(parts)
