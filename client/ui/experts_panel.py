"""Who owns which expert shard, and what would be without this node."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from spes_p2p.client.output import count_text, short_peer
from spes_p2p.client.standing import is_tentative
from spes_p2p.client.ui.panel import SEPARATOR, Panel, fit, lines_of
from spes_p2p.node.snapshot import NodeSnapshot, ShardView

CELL_WIDTH = 18
LABEL_WIDTH = 6
LEGEND = "* mine · other 2 co-owned ! orphan"
LONG_LEGEND = (
    "* mine  +1 one more owner  r7 last accepted update in round 7  orphan: nobody owns it, everybody keeps it"
)
LONG_HEIGHT = 14
"""From this height on there is room for explanations."""


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
        """The map, large where it fits, and below it what would be if this node left."""
        notes = [Content.styled(line, style) for line, style in if_i_leave(snapshot, width)] if snapshot.shards else []
        if height < LONG_HEIGHT:
            notes = notes[: height > 2]
        columns = max(width // CELL_WIDTH, 1)
        is_large = -(-len(snapshot.shards) // columns) <= height - len(notes)
        lines = _large_map(snapshot, columns) if is_large else _small_map(snapshot, width, height - len(notes) - 1)
        legend = [Content.styled(line, "dim") for line in lines_of(LONG_LEGEND if is_large else LEGEND, width)]
        if height >= LONG_HEIGHT:
            legend = [Content(""), *legend]
        if snapshot.shards and len(lines) + len(legend) + len(notes) <= height:
            lines += legend
        return [*lines, *notes][:height]


def uncovered(snapshot: NodeSnapshot) -> tuple[int, ...]:
    """Shards that nobody but this node owns."""
    return tuple(view.shard for view in snapshot.shards if view.owners == (snapshot.peer,))


def if_i_leave(snapshot: NodeSnapshot, width: int) -> list[tuple[str, str]]:
    """(line, style): what nobody would own if this node ended now, and what a proper leave does about it."""
    alone = uncovered(snapshot)
    if not alone:
        return [(fit("if I leave now: nothing is uncovered", width), "")]
    verb = "are" if len(alone) > 1 else "is"
    first = f"if I leave now: shard{'s' * (len(alone) > 1)} {ranges(alone)} {verb} uncovered"
    if len(first) > width:
        first = fit(f"if I leave now: {count_text(len(alone), 'shard')} uncovered", width)
    more = "a proper leave hands what is uncovered to a successor first"
    return [(first, "$text-warning"), *((line, "dim") for line in lines_of(more, width))]


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short, such as `0, 4-6`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in found)


def _large_map(snapshot: NodeSnapshot, columns: int) -> list[Content]:
    cells = [_cell(view, snapshot) for view in snapshot.shards]
    return [Content("").join(cells[first : first + columns]) for first in range(0, len(cells), columns)]


def _cell(view: ShardView, snapshot: NodeSnapshot) -> Content:
    when = f"r{view.last_accepted_round}" if view.last_accepted_round else "new"
    if not view.owners:
        return Content.styled(f"{view.shard:>3} {'orphan':<10}{when:<4}", "$text-error")
    more = f"+{len(view.owners) - 1}" if len(view.owners) > 1 else ""
    who = "mine" if view.mine else short_peer(view.owners[0]).removeprefix("…")
    return Content.styled(
        f"{view.shard:>3}{'*' if view.mine else ' '}{who + more:<10}{when:<4}", _style(view, snapshot)
    )


def _style(view: ShardView, snapshot: NodeSnapshot) -> str:
    age = snapshot.certified_round - view.last_accepted_round
    if not view.owners:
        return "$text-error"
    if view.mine:
        return "bold $text-success"
    return "$text-warning" if age > 1 and view.last_accepted_round else ""


def _small_map(snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
    """One character per shard, in rows of tens; if that does not fit either, the last line counts what is missing."""
    per_row = max((width - LABEL_WIDTH) // 10 * 10, 10)
    shards = snapshot.shards
    rows = -(-len(shards) // per_row)
    shown = rows if rows <= height else max(height - 1, 0)
    lines = []
    for row in range(shown):
        views = shards[row * per_row : (row + 1) * per_row]
        marks = [Content.styled(_mark(view), _style(view, snapshot)) for view in views]
        lines.append(Content(f"{views[0].shard:>{LABEL_WIDTH - 1}} ") + Content("").join(marks))
    if shown < rows:
        lines.append(Content(fit(f"and {len(shards) - shown * per_row:,} more shards", width)))
    return lines


def _mark(view: ShardView) -> str:
    if not view.owners:
        return "!"
    if view.mine:
        return "*"
    return str(min(len(view.owners), 9)) if len(view.owners) > 1 else "·"
