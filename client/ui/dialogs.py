"""Screens that lie over the others: help, and the questions before a leave and before the end."""

from __future__ import annotations

from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Label

from spes_p2p.client.ui.experts_panel import if_i_leave
from spes_p2p.node.snapshot import NodeSnapshot

Role = Literal["own", "attached", "demo"]
"""Of whom the UI is: of a node that it started and that ends with it, of one that runs anyway, of a whole demo."""
TEXT_WIDTH = 68

HELP = """\
1-7, Tab  views: everything at once, or one panel with all the room
Round     the phases of the open round; ▶ is the open one
          tentative: without enough voters; void if the others decide
          otherwise. Final is final. Kept parts: no agreed average
Experts   * mine · r7: last accepted update in round 7
          +1: one more owner · orphan: nobody owns it, everybody keeps it
Learning  loss of this peer's training, and the run's on the held-out set;
          what became of this node's updates, and why one was refused
Network   ● connected ○ not · r7: last heard of in round 7
Log       f  warnings, errors, all · /  look for a text · arrows scroll

p         pause, or resume: a paused node trains nothing, and votes
l         leave properly: hand in the work, then end (asks)"""
OWN_HELP = """
Ctrl-C    once: leave properly; twice: end now
q         end (asks)"""
DETACH_HELP = """
d         detach: close this UI, the node goes on"""
ATTACHED_HELP = """
d, q      detach: close this UI, the node goes on"""
DEMO_HELP = """
n, b      show the next peer, the one before
q         end the demo (asks)"""
COMMON_HELP = """
t         throttle: all limits, of traffic, hours and GPU
c         colours: dark, light, gruvbox, the terminal's, none
?         this; Esc closes it"""


def help_text(role: Role, *, can_detach: bool) -> str:
    """What fits to how the UI was started."""
    own = OWN_HELP + DETACH_HELP * can_detach
    return HELP + {"own": own, "attached": ATTACHED_HELP, "demo": DEMO_HELP}[role] + COMMON_HELP


class HelpScreen(ModalScreen[None]):
    """What the panels and keys mean; scrolls where it does not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "close")]

    def __init__(self, role: Role, *, can_detach: bool) -> None:
        super().__init__()
        self._text = help_text(role, can_detach=can_detach)

    def compose(self) -> ComposeResult:
        """One box."""
        with VerticalScroll(classes="dialog"):
            yield Label(self._text, markup=False)


class QuitScreen(ModalScreen[str]):
    """Asks how to end; the answer is `leave`, `detach`, `stop` or the empty text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "dismiss('leave')", "leave properly"),
        Binding("d", "dismiss('detach')", "detach"),
        Binding("e", "dismiss('stop')", "end now"),
        Binding("escape,c,q", "dismiss('')", "go on"),
    ]

    def __init__(self, role: Role, *, can_detach: bool) -> None:
        super().__init__()
        self._role = role
        self._can_detach = can_detach

    def compose(self) -> ComposeResult:
        """The question and its keys."""
        with Vertical(classes="dialog"):
            if self._role == "demo":
                yield Label("End the demo and all its peers?")
                yield Label("e  end", markup=False)
            else:
                yield Label("End this node?")
                yield Label("l  leave properly: the others take over its shards", markup=False)
                yield Label("e  end now: its shards wait until its lease lapses", markup=False)
                if self._can_detach:
                    yield Label("d  detach: close this UI, the node goes on", markup=False)
            yield Label("Esc  go on", classes="keys")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing to leave in the demo, nothing to detach from where the node ends with the UI."""
        if parameters == ("leave",):
            return self._role != "demo"
        if parameters == ("detach",):
            return self._can_detach
        return True


class LeaveScreen(ModalScreen[bool]):
    """Asks before a leave, which cannot be taken back, and says what it means just now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,enter", "dismiss(True)", "leave"),
        Binding("escape,c,q", "dismiss(False)", "stay"),
    ]

    def __init__(self, snapshot: NodeSnapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def compose(self) -> ComposeResult:
        """What is owned alone, what happens, the keys."""
        with Vertical(classes="dialog"):
            yield Label("Leave the run properly?")
            yield Label("This round is finished and handed in, successors fetch the shards,", markup=False)
            yield Label("then the node ends. It says when it is safe to close.", markup=False)
            yield Label(if_i_leave(self._snapshot, TEXT_WIDTH)[0][0], markup=False)
            yield Label("l  leave    Esc  stay", classes="keys")
