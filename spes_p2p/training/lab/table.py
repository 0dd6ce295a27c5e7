"""Means over seeds, and which differences may be claimed.

A difference of two methods counts only if it is larger than twice the spread of the seeds: the largest minus the
smallest result of one method, of the one that has more of it. A method with one seed borrows the largest spread that
any method on the same text has; if none has several seeds, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from spes_p2p.training.lab.experiment import Method, Outcome, Text

CLAIMED_SPREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one text."""

    text: Text
    method: Method
    losses: tuple[float, ...]
    """Held-out loss at the end, nats per byte, one per seed."""
    spread: float | None
    """Of the seeds; borrowed if there is one seed, None if nobody has it to lend."""
    cpu_seconds: float
    """Of the longest run."""

    @property
    def mean(self) -> float:
        """Mean loss over the seeds."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One method against another on the same text."""

    ours: Row
    peer: Row

    @property
    def relative(self) -> float:
        """How far ours is behind: 0.05 is a loss 5 % above the peer's."""
        return self.ours.mean / self.peer.mean - 1

    @property
    def is_claimed(self) -> bool:
        """Whether the difference is larger than twice the spread of the seeds."""
        if self.ours.spread is None or self.peer.spread is None:
            return False
        noise = max(self.ours.spread, self.peer.spread)
        return abs(self.ours.mean - self.peer.mean) > CLAIMED_SPREADS * noise

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no difference shown`."""
        if not self.is_claimed:
            return "no difference shown"
        return "worse" if self.relative > 0 else "better"


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """A row for each method on each text, in the order of the methods' names in `experiment`."""
    found: dict[tuple[Text, Method], list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.experiment.text, outcome.experiment.method), []).append(outcome)
    rows: list[Row] = []
    for text in get_args(Text):
        groups = {method: found[text, method] for method in get_args(Method) if (text, method) in found}
        known = [_spread(group) for group in groups.values() if len(group) > 1]
        borrowed = max(known, default=None)
        for method, group in groups.items():
            rows.append(
                Row(
                    text=text,
                    method=method,
                    losses=tuple(
                        outcome.last for outcome in sorted(group, key=lambda outcome: outcome.experiment.seed)
                    ),
                    spread=_spread(group) if len(group) > 1 else borrowed,
                    cpu_seconds=max(outcome.cpu_seconds for outcome in group),
                )
            )
    return rows


def difference(rows: Sequence[Row], text: Text, ours: Method, peer: Method) -> Difference | None:
    """Two methods of one text; None if one of them was not run."""
    by_method = {row.method: row for row in rows if row.text == text}
    if ours not in by_method or peer not in by_method:
        return None
    return Difference(ours=by_method[ours], peer=by_method[peer])


def _spread(group: Sequence[Outcome]) -> float:
    losses = [outcome.last for outcome in group]
    return max(losses) - min(losses)
