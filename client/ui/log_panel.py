"""The node's log."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import RichLog

from spes_p2p.client.output import duration_text
from spes_p2p.node.snapshot import LogEvent

MAX_LINES = 1000
STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class LogPanel(RichLog):
    """The latest lines; scrolls when it has the focus."""

    BORDER_TITLE = "Log"

    def __init__(self) -> None:
        super().__init__(max_lines=MAX_LINES, wrap=True, markup=False, min_width=20)

    def add(self, event: LogEvent) -> None:
        """Append one line of the node's log."""
        level = "" if event.level == "info" else f"{event.level}: "
        self.write(Text(f"{duration_text(event.at_ms):>12}  {level}{event.text}", STYLES[event.level]))
