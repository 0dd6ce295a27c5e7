"""The line above the keys: is it working, and what does it wait for."""

from __future__ import annotations

import time

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from spes_p2p.client.output import duration_text
from spes_p2p.client.standing import certified_text, is_tentative, trouble_texts
from spes_p2p.client.ui.panel import MOST_LINES, fit, fit_height
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.units import bytes_text

QUIET_S = 3
"""A node that has said nothing for so long is worth a word."""

WORD_WIDTH = 8
"""Cells that may stay empty where a line is broken between words."""


class StatusLine(Static):
    """State of the node, or what is wrong with the connection to it."""

    snapshot: reactive[NodeSnapshot | None] = reactive(None)
    feed_name: reactive[str] = reactive("")
    problem: reactive[str] = reactive("")
    silent_s: reactive[int] = reactive(0)
    heard_at_s: reactive[float] = reactive(0.0)

    def watch_snapshot(self) -> None:
        """Trouble takes lines."""
        fit_height(self, self.render())

    def watch_problem(self) -> None:
        """So does what is wrong with the connection."""
        fit_height(self, self.render())

    def watch_silent_s(self) -> None:
        """And for how long the node has said nothing."""
        fit_height(self, self.render())

    def render(self) -> Content:
        """One line; more only for trouble, which is not cut off."""
        text = status_text(self.snapshot, self.problem, self.silent_s, self.heard_at_s)
        name = f"{self.feed_name}: " if self.feed_name else ""
        troubled = self.snapshot is not None and bool(trouble_texts(self.snapshot))
        silent = self.silent_s >= QUIET_S or bool(self.problem)
        room = MOST_LINES * (self.size.width - WORD_WIDTH) if troubled or silent else self.size.width
        return Content.styled(fit(name + text, room), "bold $text-warning" if silent or troubled else "")


def status_text(snapshot: NodeSnapshot | None, problem: str, silent_s: int, heard_at_s: float) -> str:
    """What the line says, without the name of the node. `heard_at_s`: wall time of the node's last word."""
    if snapshot is None:
        return problem or "waiting for the node"
    if problem or silent_s >= QUIET_S:
        since = time.strftime("%H:%M:%S", time.localtime(heard_at_s))
        words = f"no answer since {since} ({duration_text(silent_s * 1000)})"
        return f"{words}: {problem}" if problem else words
    parts = [
        "leaving" if snapshot.leaving else "voter" if snapshot.voter else "member" if snapshot.member else "joining"
    ]
    if snapshot.round.number:
        parts.append(certified_text(snapshot) if is_tentative(snapshot) else f"{certified_text(snapshot)} certified")
    parts += [f"{label}: {text}" for label, text in trouble_texts(snapshot)]
    if snapshot.round.waiting_for and not snapshot.waiting:
        parts.append(f"waits for {snapshot.round.waiting_for}")
    parts.append(f"{snapshot.machine.device} {bytes_text(snapshot.machine.memory_bytes)}")
    if snapshot.machine.trainer_restarts:
        times = snapshot.machine.trainer_restarts
        parts.append("trainer restarted once" if times == 1 else f"trainer restarted {times} times")
    return " · ".join(parts)
