"""The views: everything at once, or one panel with all the room there is; and the line that names them."""

from __future__ import annotations

from typing import Literal

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

ViewName = Literal["overview", "round", "experts", "learning", "network", "machine", "log"]
VIEWS: tuple[ViewName, ...] = ("overview", "round", "experts", "learning", "network", "machine", "log")
"""In the order of their keys: `1` is the first."""


def beside(view: ViewName, step: int) -> ViewName:
    """The view so many places further, round and round."""
    return VIEWS[(VIEWS.index(view) + step) % len(VIEWS)]


class ViewsLine(Static):
    """Names the views with their keys; the one shown stands out without colour, too."""

    view: reactive[ViewName] = reactive[ViewName]("overview")

    def render(self) -> Content:
        """One line of 80 columns at most."""
        parts = []
        for number, name in enumerate(VIEWS, 1):
            style = "bold reverse" if name == self.view else ""
            parts.append(Content.styled(f" {number} {name.capitalize()} ", style).stylize(f"@click=app.view({number})"))
        return Content("").join(parts)
