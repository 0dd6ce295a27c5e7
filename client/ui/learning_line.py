"""The figures below the loss curves."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.ui.panel import Panel, pack
from spes_p2p.node.snapshot import NodeSnapshot


class LearningLine(Panel):
    """Held-out loss, speed, tokens, and what became of the last update."""

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """The most telling figures first; two lines in narrow terminals."""
        learning = snapshot.learning
        parts = []
        if learning.val_curve:
            parts.append(f"{learning.val_curve[-1][1]:.3f} nats/byte")
        elif learning.loss_curve:
            parts.append(f"{learning.loss_curve[-1][1]:.3f} nats/token")
        if learning.updates:
            last = learning.updates[-1]
            parts.append(f"r{last.round} {last.verdict}")
        parts.append(f"{learning.tokens_per_s:,.0f} tok/s")
        parts.append(f"{learning.tokens_total:,} tokens")
        return [Content(line) for line in pack(parts, width, height)]
