"""How far the round is."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import count_text, duration_text, short_peer
from spes_p2p.client.standing import ON_PURPOSE, certified_text, is_tentative
from spes_p2p.client.ui.panel import SEPARATOR, Panel, bar, fit
from spes_p2p.node.snapshot import NodeSnapshot, PhaseView

NAME_WIDTH = 11
DETAIL_WIDTH = 13
"""Room beside the bars, so that they stay as long as they are in most phases."""
MAX_BAR = 60


class RoundPanel(Panel):
    """A progress bar per phase, the leader and the votes, and how certain the newest certificate is."""

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
        """One line per phase, then the leader and the votes, or what the node waits for before its first round; below
        that, where there is room, the newest certificate and this node's part in it."""
        view = snapshot.round
        longest = max((len(phase.detail) for phase in view.phases), default=0)
        bar_width = max(min(width - NAME_WIDTH - max(longest, DETAIL_WIDTH) - 3, MAX_BAR), 6)
        lines = [_phase_line(phase, phase.name == view.phase, bar_width, width) for phase in view.phases]
        if not lines:
            lines = [Content.styled(fit(f"{view.phase}: {view.waiting_for}", width), "bold")]
        if snapshot.waiting:
            lines.append(Content.styled(fit(snapshot.waiting, width), "bold $text-warning"))
        else:
            lines.append(Content(fit(_leader_text(snapshot), width)))
        lines += [Content.styled(fit(text, width), style) for text, style in _details(snapshot)]
        return lines[: max(height, 1)]


def _leader_text(snapshot: NodeSnapshot) -> str:
    view = snapshot.round
    leader = "me" if view.leader == snapshot.peer else short_peer(view.leader)
    votes = f"  votes {min(view.votes, view.votes_needed)}/{view.votes_needed}" if view.votes_needed else ""
    again = f"  view {view.view}" if view.view else ""
    return f"leader {leader}{votes}{again}"


def _details(snapshot: NodeSnapshot) -> list[tuple[str, str]]:
    """(text, style) of further lines, the most telling first."""
    view = snapshot.round
    found: list[tuple[str, str]] = []
    if view.last_kept_parts:
        kept = f"kept {view.last_kept_parts} of {view.last_parts} parts: no agreed average"
        found.append((f"round {snapshot.certified_round} {kept}", "$text-warning"))
    standing = certified_text(snapshot) if is_tentative(snapshot) else f"{certified_text(snapshot)}, final"
    found.append((f"newest certificate: {standing}", "$text-warning" if is_tentative(snapshot) else ""))
    if view.last_parts and not view.last_kept_parts:
        found.append((f"all {count_text(view.last_parts, 'part')} of psi were averaged in it", ""))
    if snapshot.learning.updates:
        last = snapshot.learning.updates[-1]
        refused = last.verdict.startswith("refused")
        found.append((f"my update of round {last.round}: {last.verdict}", "$text-error" if refused else ""))
    if view.waiting_for and view.phases:
        found.append((f"waits for {view.waiting_for}", ""))
    found.append((f"this round has taken {duration_text(view.elapsed_ms)} so far", "dim"))
    if snapshot.epoch:
        found.append((f"epoch {snapshot.epoch}: so many recoveries were made", "$text-warning"))
    return found


def _phase_line(phase: PhaseView, is_open: bool, bar_width: int, width: int) -> Content:
    mark = "▶" if is_open else " "
    text = f"{mark}{phase.name:<{NAME_WIDTH}} {bar(phase.progress, bar_width)} {phase.detail}"
    style = "bold" if is_open else "dim" if phase.progress == 0 else ""
    return Content.styled(fit(text, width), style)
