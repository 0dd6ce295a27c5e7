"""What becomes of the peers' deltas of one flat vector of weights: pure functions in float64, rounded once to fp32.

n values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spes_p2p.digests import digest
from spes_p2p.training.arrays import F32, F64
from spes_p2p.training.lab.experiment import OuterConfig, PairConfig


def mean_of(vectors: Sequence[F32]) -> F64:
    """Mean [n] of equally weighted vectors."""
    mean: F64 = np.mean(np.stack(vectors), axis=0, dtype=np.float64)
    return mean


def nesterov_step(before: F32, mean_delta: F64, momentum: F64, config: OuterConfig) -> tuple[F32, F64]:
    """(weights, momentum) after one outer step, [n] each: g = -mean_delta; b <- mu*b + g; w <- w - eta*(g + mu*b)
    (DiLoCo, arXiv 2311.08105)."""
    gradient = -mean_delta
    momentum = config.momentum * momentum + gradient
    after = before.astype(np.float64) - config.learning_rate * (gradient + config.momentum * momentum)
    return after.astype(np.float32), momentum


def pair_step(
    slow: Sequence[F32], fast: Sequence[F32], momentum: Sequence[F64], config: PairConfig
) -> tuple[list[F32], list[F64]]:
    """(slow weights, momentum) of the members of one group after their outer step (NoLoCo, arXiv 2506.10911):
    v_i <- a*v_i + b*mean(fast - slow) + g*(mean(slow) - slow_i); slow_i <- slow_i + v_i."""
    mean_delta = mean_of([np.subtract(f, s, dtype=np.float32) for f, s in zip(fast, slow, strict=True)])
    mean_slow = mean_of(slow)
    after: list[F32] = []
    velocities: list[F64] = []
    for own, velocity in zip(slow, momentum, strict=True):
        wide = own.astype(np.float64)
        velocity = config.momentum * velocity + config.delta * mean_delta + config.pull * (mean_slow - wide)
        velocities.append(velocity)
        after.append((wide + velocity).astype(np.float32))
    return after, velocities


def pairs_of(num_peers: int, seed: int, round_number: int) -> list[tuple[int, int]]:
    """Who exchanges with whom in a round: a permutation that everybody can draw for himself. `num_peers` is even."""
    drawn = sorted(range(num_peers), key=lambda place: digest("spes lab pairs", seed, round_number, place))
    return [(drawn[at], drawn[at + 1]) for at in range(0, num_peers, 2)]
