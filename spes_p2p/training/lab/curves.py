"""Learning curves as pictures. Needs the extra `lab`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from spes_p2p.training.lab.experiment import Method, Outcome, Text

SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 120


def draw_curves(outcomes: Iterable[Outcome], folder: Path) -> list[Path]:
    """One picture for each text, `learning-TEXT.png`: held-out loss against tokens, a line for each run, one colour for
    each method. Returns what was written. Raises ImportError without matplotlib, OSError if the disk refuses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finished = list(outcomes)
    written: list[Path] = []
    for text in get_args(Text):
        runs = [outcome for outcome in finished if outcome.experiment.text == text]
        if not runs:
            continue
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for place, method in enumerate(get_args(Method)):
            of_method = [outcome for outcome in runs if outcome.experiment.method == method]
            for number, outcome in enumerate(of_method):
                axes.plot(*_line(outcome), color=f"C{place}", label=method if number == 0 else None, linewidth=1)
        axes.set_xlabel("tokens of all peers")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_title({"iid": "every peer has all kinds of text", "kinds": "each peer has one kind of text"}[text])
        axes.legend()
        path = folder / f"learning-{text}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        written.append(path)
    return written


def _line(outcome: Outcome) -> tuple[Sequence[int], Sequence[float]]:
    return [point.tokens for point in outcome.curve], [point.nats_per_byte for point in outcome.curve]
