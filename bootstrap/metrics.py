"""Figures of a bootstrap node in the text form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "spes_bootstrap_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure, or several that differ by a label."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    value: float | None = None
    """None: not known now, or `values` has it."""
    label: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    """By the value of `label`."""


def render(metrics: Iterable[Metric]) -> str:
    """The text; a figure that is not known is left out."""
    lines = []
    for metric in metrics:
        name = PREFIX + metric.name
        samples = [f'{name}{{{metric.label}="{_escaped(key)}"}} {value:.17g}' for key, value in metric.values.items()]
        if metric.value is not None:
            samples.append(f"{name} {metric.value:.17g}")
        if samples:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}", *samples]
    return "\n".join(lines) + "\n"


def sum_of(text: str, name: str) -> float | None:
    """The sum of a figure over its labels, in text of that form; None if it is not there. Raises ValueError."""
    found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(found) if found else None


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
