"""How far the round is."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import duration_text, short_peer
from spes_p2p.client.ui.panel import Panel, bar, fit
from spes_p2p.node.snapshot import NodeSnapshot, PhaseView

NAME_WIDTH = 11


class RoundPanel(Panel):
    """A progress bar per phase, the leader and the votes."""

    BORDER_TITLE = "Round"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title carries the number and the time left."""
        if snapshot is None:
            return
        view = snapshot.round
        left = f" · {duration_text(view.time_left_ms)} left" if view.time_left_ms is not None else ""
        how = " · tentative" if snapshot.certified_round > snapshot.final_round else ""
        self.border_title = f"Round {view.number}{how}{left}"

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """One line per phase, then the leader and the votes, or what the node waits for before its first round."""
        view = snapshot.round
        lines = [_phase_line(phase, phase.name == view.phase, width) for phase in view.phases]
        if not lines:
            lines = [Content.styled(fit(f"{view.phase}: {view.waiting_for}", width), "bold")]
        leader = "me" if view.leader == snapshot.peer else short_peer(view.leader)
        votes = f"  votes {view.votes}/{view.votes_needed}" if view.votes_needed else ""
        again = f"  view {view.view}" if view.view else ""
        lines.append(Content(fit(f"leader {leader}{votes}{again}", width)))
        return lines


def _phase_line(phase: PhaseView, is_open: bool, width: int) -> Content:
    bar_width = max(min(width - NAME_WIDTH - 16, 30), 6)
    mark = "▶" if is_open else " "
    text = f"{mark}{phase.name:<{NAME_WIDTH}} {bar(phase.progress, bar_width)} {phase.detail}"
    style = "bold" if is_open else "dim" if phase.progress == 0 else ""
    return Content.styled(fit(text, width), style)
