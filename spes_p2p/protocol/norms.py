"""Absurd norms: how long the deltas that an update states may be (docs/protocol.md, section 4). A local check.

Two yardsticks: the updates accepted lately, and those of the same round. Whoever keeps within the bound of either is
believed. After a merge, with a growing learning rate, or when everybody makes more steps than before, all honest deltas
grow together, and a bound by the past alone would refuse them for ever: nothing refused becomes the past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from spes_p2p.protocol.codec import unpack_float
from spes_p2p.protocol.messages import Manifest
from spes_p2p.protocol.transition import psi_squared_norm
from spes_p2p.protocol.wire import PieceKind

NORMS_KEPT = 64
"""Norms of accepted updates that make the yardstick of the past, of psi and of experts each."""

_SMALLEST = 1e-12
"""Where most deltas are zero, one that is not is no liar's yet."""

Length: TypeAlias = tuple[float, int]
"""Norm of a delta, and the inner steps behind it."""

Typical: TypeAlias = tuple[float, float]
"""Medians of the norms, and of the norms per step."""


@dataclass(frozen=True)
class Yardstick:
    """Lengths of psi deltas, and of experts' deltas."""

    psi: tuple[Length, ...] = ()
    experts: tuple[Length, ...] = ()

    def extended(self, manifests: Iterable[Manifest]) -> Yardstick:
        """With these updates too; the oldest are forgotten."""
        psi, experts = list(self.psi), list(self.experts)
        for manifest in manifests:
            psi.append((math.sqrt(psi_squared_norm(manifest)), manifest.steps))
            experts += [(norm, manifest.steps) for _, norm in _expert_norms(manifest)]
        return Yardstick(tuple(psi[-NORMS_KEPT:]), tuple(experts[-NORMS_KEPT:]))

    def absurd_piece(self, manifest: Manifest, *, bound: float, most_steps: int) -> int | None:
        """Place of a piece whose stated norm is beyond `bound` medians, 0 for psi as a whole; None if all are within.

        Medians are of the norms, and of the norms per step times the update's own steps, whichever allows more: a fast
        peer that makes many steps goes further than slow ones. It may state `most_steps` at most.
        """
        steps = min(manifest.steps, most_steps)
        if _is_beyond(math.sqrt(psi_squared_norm(manifest)), steps, self._typical_psi, bound):
            return 0
        for place, norm in _expert_norms(manifest):
            if _is_beyond(norm, steps, self._typical_expert, bound):
                return place
        return None

    @cached_property
    def _typical_psi(self) -> Typical | None:
        return _typical(self.psi)

    @cached_property
    def _typical_expert(self) -> Typical | None:
        return _typical(self.experts)


def _expert_norms(manifest: Manifest) -> list[tuple[int, float]]:
    return [
        (place, math.sqrt(unpack_float(piece.squared_norm)))
        for place, piece in enumerate(manifest.pieces)
        if piece.kind is PieceKind.EXPERT
    ]


def _typical(lengths: Sequence[Length]) -> Typical | None:
    if not lengths:
        return None
    return _median([norm for norm, _ in lengths]), _median([norm / max(1, num) for norm, num in lengths])


def _is_beyond(norm: float, steps: int, typical: Typical | None, bound: float) -> bool:
    return typical is not None and norm > bound * max(typical[0], typical[1] * steps, _SMALLEST)


def _median(values: list[float]) -> float:
    """The lower one of two: with half of the values from liars, it is still an honest one."""
    return sorted(values)[(len(values) - 1) // 2]
