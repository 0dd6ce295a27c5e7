"""Screens that lie over the others: help, and the question before the end."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Label

HELP = """\
Round     the phases of the open round; ▶ is the open one
Experts   * mine · r7: last accepted update in round 7
          orphan: nobody owns it, everybody keeps it
tentative without enough voters; void if the others decide
          otherwise. Final is final.
Learning  loss of this peer's training, and the run's loss
          on the held-out set
Peers     ● connected ○ not · r7: last heard of in round 7

l         leave properly: hand in the work, then end
Ctrl-C    once: leave properly; twice: end now
q         end (asks)
Tab       move the focus, arrows scroll the log"""

SWITCH_HELP = "\n1-9       show another peer"


class HelpScreen(ModalScreen[None]):
    """What the panels and keys mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "close")]

    def __init__(self, *, many: bool) -> None:
        super().__init__()
        self._many = many

    def compose(self) -> ComposeResult:
        """One box."""
        with Vertical(classes="dialog"):
            yield Label(HELP + (SWITCH_HELP if self._many else ""), markup=False)
            yield Label("Esc closes this", classes="keys")


class QuitScreen(ModalScreen[str]):
    """Asks how to end; the answer is `leave`, `stop` or the empty text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "dismiss('leave')", "leave properly"),
        Binding("e", "dismiss('stop')", "end now"),
        Binding("escape,c,q", "dismiss('')", "go on"),
    ]

    def __init__(self, *, can_leave: bool) -> None:
        super().__init__()
        self._can_leave = can_leave

    def compose(self) -> ComposeResult:
        """The question and its keys."""
        with Vertical(classes="dialog"):
            if self._can_leave:
                yield Label("End this node?")
                yield Label("l  leave properly: the others take over its shards", markup=False)
                yield Label("e  end now: its shards wait until its lease lapses", markup=False)
            else:
                yield Label("End the demo and all its peers?")
                yield Label("e  end", markup=False)
            yield Label("Esc  go on", classes="keys")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing to leave where nothing was joined."""
        return self._can_leave or parameters != ("leave",)
