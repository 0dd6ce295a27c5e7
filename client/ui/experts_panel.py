"""Who owns which expert shard."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import count_text, short_peer
from spes_p2p.client.standing import is_tentative
from spes_p2p.client.ui.panel import SEPARATOR, Panel, fit
from spes_p2p.node.snapshot import NodeSnapshot, ShardView

CELL_WIDTH = 18


class ExpertsPanel(Panel):
    """A map of all shards: mine with a star, co-owned ones with the number of owners, orphans named."""

    BORDER_TITLE = "Experts"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title counts."""
        if snapshot is None:
            return
        mine = sum(1 for view in snapshot.shards if view.mine)
        orphans = sum(1 for view in snapshot.shards if not view.owners)
        parts = ["Experts", f"{mine} of {len(snapshot.shards)} mine"]
        if is_tentative(snapshot):
            parts.append("tentative")
        if orphans:
            parts.append(count_text(orphans, "orphan"))
        self.border_title = SEPARATOR.join(parts)

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """As many columns as fit; if the shards do not, the last line says how many are missing."""
        columns = max(width // CELL_WIDTH, 1)
        rows = -(-len(snapshot.shards) // columns)
        shown = min(rows, max(height, 1))
        if shown < rows:
            shown = max(shown - 1, 0)
        lines = []
        for row in range(shown):
            cells = [_cell(view, snapshot) for view in snapshot.shards[row * columns : (row + 1) * columns]]
            lines.append(Content("").join(cells))
        if shown < rows:
            lines.append(Content(fit(f"and {len(snapshot.shards) - shown * columns} more shards", width)))
        return lines


def _cell(view: ShardView, snapshot: NodeSnapshot) -> Content:
    age = snapshot.certified_round - view.last_accepted_round
    when = f"r{view.last_accepted_round}" if view.last_accepted_round else "new"
    if not view.owners:
        return Content.styled(f"{view.shard:>3} {'orphan':<10}{when:<4}", "$text-error")
    more = f"+{len(view.owners) - 1}" if len(view.owners) > 1 else ""
    who = "mine" if view.mine else short_peer(view.owners[0]).removeprefix("…")
    style = "bold $text-success" if view.mine else "$text-warning" if age > 1 and view.last_accepted_round else ""
    return Content.styled(f"{view.shard:>3}{'*' if view.mine else ' '}{who + more:<10}{when:<4}", style)
