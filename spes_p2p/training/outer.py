"""Outer steps: from psi and the mean of the peers' deltas to the next psi. Bit rules apply to this file.

`mean` (SPES, arXiv 2602.11543): psi + mean. `nesterov` (DiLoCo, arXiv 2311.08105) takes -mean for a gradient:

    g = -mean;  b <- mu b + g;  psi <- psi - eta (g + mu b)

What is kept and certified is m = -b, the way psi is heading, so that no sign is turned twice:

    m <- mu m + mean;  psi <- psi + eta (mean + mu m)

All in float64 from fp32 values. psi is made from the m that is not rounded yet; each is rounded once. With eta 1 and
mu 0 that is `mean` to the bit. A part that no update reached, or that a certificate keeps, takes no step: its momentum
stays, and psi does not coast.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.config import OuterConfig
from spes_p2p.training.arrays import F32, F64
from spes_p2p.training.codecs import to_f32
from spes_p2p.training.layout import PartState


def outer_step(outer: OuterConfig, before: PartState, mean: F64) -> PartState:
    """The run's outer step of one part, or of any values that belong together; a new state.

    mean: [n] of the peers' deltas. Raises ValueError if `before` has momentum and the rule has none, or the other way
    round; NotFiniteError if a result overflows fp32.
    """
    if (before.momentum is not None) != outer.has_momentum:
        raise ValueError(f"the outer rule {outer.rule} does not fit a state that has or lacks momentum")
    if before.momentum is None:
        return PartState(psi=mean_step(before.psi, mean))
    psi, momentum = nesterov_step(before.psi, before.momentum, mean, outer)
    return PartState(psi=psi, momentum=momentum)


def mean_step(psi: F32, mean: F64) -> F32:
    """psi + mean: [n]. Raises NotFiniteError if that overflows fp32."""
    wide_psi = psi.astype(np.float64)
    moved = np.add(wide_psi, mean, dtype=np.float64)
    return to_f32(moved, "part of psi")


def nesterov_step(psi: F32, momentum: F32, mean: F64, outer: OuterConfig) -> tuple[F32, F32]:
    """psi + eta (mean + mu m') and m' = mu m + mean: [n] each. Raises NotFiniteError if one overflows fp32."""
    factor = np.float64(outer.momentum)
    wide_momentum = momentum.astype(np.float64)
    kept = np.multiply(wide_momentum, factor, dtype=np.float64)
    new_momentum = np.add(kept, mean, dtype=np.float64)
    ahead = np.multiply(new_momentum, factor, dtype=np.float64)
    heading = np.add(mean, ahead, dtype=np.float64)
    step = np.multiply(heading, np.float64(outer.learning_rate), dtype=np.float64)
    wide_psi = psi.astype(np.float64)
    moved = np.add(wide_psi, step, dtype=np.float64)
    return to_f32(moved, "part of psi"), to_f32(new_momentum, "momentum of psi")
