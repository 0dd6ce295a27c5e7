"""Means that all peers must agree on to the bit: parts of psi, and shards with several owners. Bit rules apply.

Accumulation is in float64, in a fixed order, one operation per statement, and is rounded once to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from spes_p2p.config import OuterConfig
from spes_p2p.ids import PeerId
from spes_p2p.training.arrays import F32, F64
from spes_p2p.training.codecs import to_f32
from spes_p2p.training.layout import PartState
from spes_p2p.training.outer import outer_step

RobustRule: TypeAlias = Literal["mean", "clipped", "trimmed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One peer's decoded delta of one part."""

    peer: PeerId
    delta: F64
    """[n] values of the part."""
    weight: float
    """Above 0: tokens, or 1, halved for each round that the update is late."""
    clip: float = 1.0
    """Factor, 0 to 1, that brings the delta's norm under the bound of the cut; 0 where most deltas of it are zero."""


def part_result(
    previous: PartState, contributions: Sequence[Contribution], robust: RobustRule, outer: OuterConfig
) -> PartState:
    """The outer step by the mean of the deltas, whatever order the contributions come in.

    robust `mean` and `clipped`: sum of weight * clip * delta over the sum of weights (`mean` with every clip at 1).
    `trimmed`: see `trimmed_mean`. Raises ValueError without contributions, for a peer that comes twice, for weights or
    shapes that do not fit, and NotFiniteError if the result overflows fp32.
    """
    ordered = sorted(contributions, key=_peer_of)
    _check(previous.psi, ordered)
    mean = trimmed_mean(ordered) if robust == "trimmed" else weighted_mean(ordered)
    return outer_step(outer, previous, mean)


def weighted_mean(ordered: Sequence[Contribution]) -> F64:
    """Sum of weight * (clip * delta) over the sum of weights, in the order given: [n]."""
    total = np.zeros_like(ordered[0].delta, dtype=np.float64)
    weight_total = np.float64(0)
    for contribution in ordered:
        weight = np.float64(contribution.weight)
        clipped = np.multiply(contribution.delta, np.float64(contribution.clip), dtype=np.float64)
        weighted = np.multiply(clipped, weight, dtype=np.float64)
        total = np.add(total, weighted, dtype=np.float64)
        weight_total = np.add(weight_total, weight, dtype=np.float64)
    mean: F64 = np.divide(total, weight_total, dtype=np.float64)
    return mean


def trimmed_mean(ordered: Sequence[Contribution]) -> F64:
    """Coordinate-wise trimmed mean: [n].

    In every coordinate the t lowest and the t highest of the c clipped deltas are left out, t = floor((c - 1) / 3), and
    the weighted mean of the others is taken, in ascending order of value; equal values keep the order given. Source:
    Yin et al., Byzantine-Robust Distributed Learning, 2018, with t as large as the protocol's bound on liars.
    """
    num_trimmed = (len(ordered) - 1) // 3
    scaled = []
    for contribution in ordered:
        clipped = np.multiply(contribution.delta, np.float64(contribution.clip), dtype=np.float64)
        scaled.append(clipped)
    stacked = np.stack(scaled)
    rank = np.argsort(stacked, axis=0, kind="stable")
    values = np.take_along_axis(stacked, rank, axis=0)
    weights = np.array([contribution.weight for contribution in ordered], dtype=np.float64)[rank]
    total = np.zeros_like(ordered[0].delta, dtype=np.float64)
    weight_total = np.zeros_like(total)
    kept = slice(num_trimmed, len(ordered) - num_trimmed)
    for row, weight in zip(values[kept], weights[kept], strict=True):
        weighted = np.multiply(row, weight, dtype=np.float64)
        total = np.add(total, weighted, dtype=np.float64)
        weight_total = np.add(weight_total, weight, dtype=np.float64)
    mean: F64 = np.divide(total, weight_total, dtype=np.float64)
    return mean


def owners_mean(values: Sequence[F32], tokens: Sequence[int]) -> F32:
    """Value of one tensor of a shard, from its owners' blobs in the order of the shard's row.

    One owner: its value. Several: the mean weighted by tokens, at least 1 each, in float64, rounded once. All values
    have one shape. Raises ValueError if there is none or the counts differ, NotFiniteError if a mean overflows.
    """
    if not values or len(values) != len(tokens):
        raise ValueError(f"{len(values)} values and {len(tokens)} token counts")
    if len(values) == 1:
        return values[0].copy()
    total = np.zeros_like(values[0], dtype=np.float64)
    weight_total = np.float64(0)
    for value, count in zip(values, tokens, strict=True):
        weight = np.float64(max(count, 1))
        wide = value.astype(np.float64)
        weighted = np.multiply(wide, weight, dtype=np.float64)
        total = np.add(total, weighted, dtype=np.float64)
        weight_total = np.add(weight_total, weight, dtype=np.float64)
    mean = np.divide(total, weight_total, dtype=np.float64)
    return to_f32(mean, "mean of a shard's owners")


def _peer_of(contribution: Contribution) -> PeerId:
    return contribution.peer


def _check(previous: F32, ordered: Sequence[Contribution]) -> None:
    if not ordered:
        raise ValueError("a part without updates is kept, not averaged")
    if len({contribution.peer for contribution in ordered}) != len(ordered):
        raise ValueError("one peer has two updates in one mean")
    for contribution in ordered:
        if contribution.delta.shape != previous.shape:
            raise ValueError(f"delta {contribution.delta.shape}, part {previous.shape}")
        if not (np.isfinite(contribution.weight) and contribution.weight > 0):
            raise ValueError(f"weight {contribution.weight}")
        if not 0 <= contribution.clip <= 1:
            raise ValueError(f"clip factor {contribution.clip}")
