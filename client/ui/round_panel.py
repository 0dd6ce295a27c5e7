"""How far the round is."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import duration_text, short_peer
from spes_p2p.client.standing import ON_PURPOSE, is_tentative
from spes_p2p.client.ui.panel import SEPARATOR, Panel, bar, fit
from spes_p2p.node.snapshot import NodeSnapshot, PhaseView

NAME_WIDTH = 11
DETAIL_WIDTH = 13
"""Room beside the bars, so that they stay as long as they are in most phases."""


class RoundPanel(Panel):
    """A progress bar per phase, the leader and the votes."""

    BORDER_TITLE = "Round"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title carries the number and the time left."""
        if snapshot is None:
            return
        view = snapshot.round
        parts = [f"Round {view.number}"]
        if snapshot.waiting:
            parts.append(ON_PURPOSE)
        elif is_tentative(snapshot):
            parts.append("on tentative rounds")
        elif view.time_left_ms is not None:
            parts.append(f"{duration_text(view.time_left_ms)} left")
        self.border_title = SEPARATOR.join(parts)

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """One line per phase, then the leader and the votes, or what the node waits for before its first round."""
        view = snapshot.round
        longest = max((len(phase.detail) for phase in view.phases), default=0)
        bar_width = max(min(width - NAME_WIDTH - max(longest, DETAIL_WIDTH) - 3, 30), 6)
        lines = [_phase_line(phase, phase.name == view.phase, bar_width, width) for phase in view.phases]
        if not lines:
            lines = [Content.styled(fit(f"{view.phase}: {view.waiting_for}", width), "bold")]
        if snapshot.waiting:
            return [*lines, Content.styled(fit(snapshot.waiting, width), "bold $text-warning")]
        leader = "me" if view.leader == snapshot.peer else short_peer(view.leader)
        votes = f"  votes {min(view.votes, view.votes_needed)}/{view.votes_needed}" if view.votes_needed else ""
        again = f"  view {view.view}" if view.view else ""
        lines.append(Content(fit(f"leader {leader}{votes}{again}", width)))
        return lines


def _phase_line(phase: PhaseView, is_open: bool, bar_width: int, width: int) -> Content:
    mark = "▶" if is_open else " "
    text = f"{mark}{phase.name:<{NAME_WIDTH}} {bar(phase.progress, bar_width)} {phase.detail}"
    style = "bold" if is_open else "dim" if phase.progress == 0 else ""
    return Content.styled(fit(text, width), style)
