"""What a person asked for and is not done: a pause, a leave, and when it is safe to close."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import duration_text
from spes_p2p.client.standing import leave_text
from spes_p2p.client.ui.panel import Panel, fit_height
from spes_p2p.node.snapshot import PAUSE, NodeSnapshot, PauseView

YOURS = "you paused it"


class Notice(Panel):
    """Nothing while the node simply works; else one to three lines above the status."""

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """Takes no room without something to say."""
        self.display = snapshot is not None and bool(notice_texts(snapshot))
        fit_height(self, self.render())

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """One text, which is wrapped; the style bounds its lines."""
        return [Content.styled(text, "bold $text-warning") for text in notice_texts(snapshot)]


def notice_texts(snapshot: NodeSnapshot) -> list[str]:
    """One text for a leave, else one for a pause: nobody who leaves resumes."""
    if snapshot.leaving:
        return [f"leaving: {leave_text(snapshot.leave, snapshot.round.waiting_for)}"]
    return [pause_text(snapshot.pause)] if snapshot.paused else []


def is_users_pause(snapshot: NodeSnapshot | None) -> bool:
    """Whether the user paused the node; limits may hold its training besides, or instead."""
    if snapshot is None or not snapshot.paused:
        return False
    return snapshot.pause is None or PAUSE in snapshot.pause.reasons


def pause_text(pause: PauseView | None) -> str:
    """Why training is held, for how long by now, and what a longer pause costs."""
    if pause is None:
        return "paused: this node trains nothing until `p` resumes it"
    text = f"paused for {duration_text(pause.since_ms)}"
    why = ", ".join(YOURS if reason == PAUSE else reason for reason in pause.reasons)
    if why:
        text += f" ({why})"
    return f"{text}: {pause.reason}" if pause.reason else text
