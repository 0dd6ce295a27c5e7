"""What became of this node's updates."""

from __future__ import annotations

from collections import Counter

from textual.content import Content

from spes_p2p.client.output import count_text
from spes_p2p.client.ui.panel import SEPARATOR, Panel, fit
from spes_p2p.node.snapshot import NodeSnapshot, UpdateView


class UpdatesPanel(Panel):
    """The newest first, each with its verdict and, if it was refused, the reason."""

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """A line that counts, then as many updates as fit."""
        learning = snapshot.learning
        lines = [Content.styled(fit(summary(learning.updates), width), "bold")]
        lines += [_line(update, width) for update in reversed(learning.updates)]
        return lines[: max(height, 1)]


def summary(updates: tuple[UpdateView, ...]) -> str:
    """Such as `my updates: 5 accepted · 1 refused`."""
    if not updates:
        return "no update of this node yet"
    counts = Counter(update.verdict.partition(":")[0] for update in updates)
    if len(updates) == 1:
        return f"my only update so far: {updates[0].verdict}"
    by_verdict = SEPARATOR.join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    return f"my last {count_text(len(updates), 'update')}: {by_verdict}"


def _line(update: UpdateView, width: int) -> Content:
    text = f"r{update.round:<5} {update.tokens:>10,} tokens  {update.verdict}"
    good = update.verdict.startswith(("accepted", "pending"))
    return Content.styled(fit(text, width), "" if good else "$text-warning")
