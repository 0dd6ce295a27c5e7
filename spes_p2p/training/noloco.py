"""NoLoCo (arXiv 2506.10911): outer steps between two peers at a time, without a psi that all have. For experiments.

Peers pair up anew in every round. Replica i has slow weights phi, fast ones theta (phi, trained for a round) and a
velocity v; Delta = theta - phi. In the pair G of i and j, with n = 2:

    v_i <- a v_i + b mean_G(Delta) + g (mean_G(phi) - phi_i);   phi_i <- phi_i + v_i;   theta_i <- phi_i

The result is an ensemble, whose mean is taken at the end. Nothing of this is agreed: no certificate names it.

Where it is stable. Take one coordinate and many replicas. Let x be the distance of phi from where training leads, and
let training go the share h of the way in a round, 0 <= h <= 1, so that Delta = -h x. With p = (g + b h) / 2 and
q = (g - b h) / 2 the step is v' = a v - p x + q y, x' = x + v', y being the x of a partner drawn at random. Partners
are as good as independent, so the mean squares X = E[x x], C = E[x v], V = E[v v] follow

    E[x v'] = a C - p X;   V' = a^2 V - 2 a p C + (p^2 + q^2) X;   C' = E[x v'] + V';   X' = X + 2 E[x v'] + V'

This linear map keeps moment matrices positive, so its largest eigenvalue is real and reaches 1 before anything
diverges, which is where the determinant of (1 - map) becomes 0. That determinant is

    2 p (1 - a^2) + 2 a p^2 - (1 + a) (p^2 + q^2) = (g + b h) (1 - a^2) + a g b h - (g^2 + b^2 h^2) / 2

Without training (h = 0) it is positive for 0 < g < 2 (1 - a^2): only then does the spread between replicas die out.
(For N replicas, N even, the bound is that over 1 - a / (N - 1): wider.) It is concave in b h, so with training it is
positive for every h if it is for h = 1. The mean of all replicas is heavy-ball descent of rate b: b < 2 (1 + a).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from spes_p2p.config import Frozen
from spes_p2p.digests import digest
from spes_p2p.ids import PeerId, RunId
from spes_p2p.training.arrays import F32, F64
from spes_p2p.training.codecs import to_f32


class NoLoCoConfig(Frozen):
    """The three numbers of the rule; the defaults are those of the release. Settings that diverge are refused."""

    momentum: float = Field(default=0.5, ge=0, lt=1)
    """a"""
    learning_rate: float = 0.7
    """b"""
    attraction: float = 0.7
    """g: the share of the way to the pair's mean."""

    @model_validator(mode="after")
    def _stable(self) -> Self:
        bound = attraction_bound(self.momentum)
        if not 0 < self.attraction < bound:
            raise ValueError(
                f"attraction {self.attraction} is not stable with momentum {self.momentum}: it must be above 0 and "
                f"below 2 (1 - momentum^2) = {bound:.3f}, or the replicas drift apart"
            )
        bound = learning_rate_bound(self.momentum, self.attraction)
        if not 0 < self.learning_rate < bound:
            raise ValueError(
                f"learning_rate {self.learning_rate} is not stable with momentum {self.momentum} and attraction "
                f"{self.attraction}: it must be above 0 and below {bound:.3f} (spes_p2p/training/noloco.py)"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One peer's weights, or a part of them: [n] each."""

    velocity: F32
    """v"""
    slow: F32
    """phi, which the round started from."""
    fast: F32
    """theta, which it was trained to."""


def attraction_bound(momentum: float) -> float:
    """2 (1 - a^2): the g below which the spread between replicas dies out."""
    return 2 * (1 - momentum**2)


def learning_rate_bound(momentum: float, attraction: float) -> float:
    """The b below which spread and mean are stable under training, for a stable g: the upper root of the condition
    above in b at h = 1, or 2 (1 + a) if that is less."""
    room = 1 - momentum**2
    middle = room + momentum * attraction
    root = middle + math.sqrt(middle**2 + 2 * attraction * room - attraction**2)
    return min(root, 2 * (1 + momentum))


def pairs(run: RunId, round_number: int, peers: Sequence[PeerId]) -> tuple[tuple[PeerId, PeerId], ...]:
    """Who exchanges with whom in a round: neighbours in a permutation of the peers that (run, round) seeds.

    A pure function of the set of peers, so that all know it without a word. With an odd number the last one rests: it
    takes no step, and trains on from its fast weights.
    """
    permuted = sorted(peers, key=lambda peer: digest("noloco", run, round_number, peer))
    return tuple(zip(permuted[0::2], permuted[1::2], strict=False))


def pair_step(config: NoLoCoConfig, one: Replica, other: Replica) -> tuple[Replica, Replica]:
    """Both replicas after their exchange, in float64, rounded once. Raises NotFiniteError if one overflows fp32."""
    delta = (_delta(one) + _delta(other)) / 2
    slow = (one.slow.astype(np.float64) + other.slow.astype(np.float64)) / 2
    return _step(config, one, delta, slow), _step(config, other, delta, slow)


def _delta(replica: Replica) -> F64:
    return replica.fast.astype(np.float64) - replica.slow.astype(np.float64)


def _step(config: NoLoCoConfig, own: Replica, mean_delta: F64, mean_slow: F64) -> Replica:
    slow = own.slow.astype(np.float64)
    velocity = config.momentum * own.velocity.astype(np.float64)
    velocity = velocity + config.learning_rate * mean_delta + config.attraction * (mean_slow - slow)
    moved = to_f32(slow + velocity, "slow weights")
    return Replica(velocity=to_f32(velocity, "velocity"), slow=moved, fast=moved.copy())
