"""Whether it learns: the loss of this peer's training, and the run's on the held-out set."""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual_plotext import PlotextPlot

from spes_p2p.client.ui.learning_line import LearningLine
from spes_p2p.client.ui.updates_panel import UpdatesPanel
from spes_p2p.node.snapshot import NodeSnapshot

AXES_ROWS = 8
"""A plot lower than this has no room for a title and axes."""


class LossPlot(PlotextPlot):
    """One curve."""

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self._title = title
        self._points: Sequence[tuple[int, float]] = ()

    def show(self, points: Sequence[tuple[int, float]]) -> None:
        """Draw the finite points; a single one is shown as a dot. The same points once more cost nothing."""
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        if finite != self._points:
            self._points = finite
            self._draw()

    def on_resize(self) -> None:
        """More room, more axes."""
        self._draw()

    def _draw(self) -> None:
        roomy = self.size.height >= AXES_ROWS
        self.plt.clear_data()
        self.plt.title(self._title if roomy else "")
        self.plt.frame(roomy)
        self.plt.xaxes(roomy, roomy)
        if self._points:
            xs, ys = [float(x) for x, _ in self._points], [y for _, y in self._points]
            ticks = whole_ticks(self._points[0][0], self._points[-1][0])
            self.plt.xticks(list(map(float, ticks)), [str(tick) for tick in ticks])
            self.plt.xlim(*limits(xs))
            self.plt.ylim(*limits(ys))
            if len(self._points) == 1:
                self.plt.scatter(xs, ys, marker="dot")
            else:
                self.plt.plot(xs, ys, marker="braille")
        self.refresh()


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis that shows all values. Never the same number twice, by whose distance the plot divides."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def whole_ticks(first: int, last: int, num_ticks: int = 5) -> list[int]:
    """At most that many whole numbers from `first` to `last`, about evenly spaced: steps and rounds have no halves."""
    return sorted({round(first + (last - first) * tick / (num_ticks - 1)) for tick in range(num_ticks)})


class LearningPanel(Vertical):
    """This peer's curve, the run's curve where there is room, the figures below, and this node's updates."""

    BORDER_TITLE = "Learning"

    snapshot: reactive[NodeSnapshot | None] = reactive(None)

    def compose(self) -> ComposeResult:
        """Two plots, a line, and the updates, which the style shows where there is room."""
        with Horizontal():
            yield LossPlot("training, nats by step", id="training-loss")
            yield LossPlot("held-out, nats by round", id="held-out-loss")
        yield LearningLine().data_bind(LearningPanel.snapshot)
        yield UpdatesPanel().data_bind(LearningPanel.snapshot)

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """Redraw."""
        if snapshot is None:
            return
        learning = snapshot.learning
        self.query_one("#training-loss", LossPlot).show(learning.loss_curve)
        self.query_one("#held-out-loss", LossPlot).show(learning.val_curve)
