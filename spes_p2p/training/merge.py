"""Merge warm-up: every receiving expert moves toward the experts most like it. Bit rules apply to this file.

    phi~_j = phi_j + (alpha / K) * sum over k in Q_j of (phi_k - phi_j)        for gate, up and down, by name

All from unmerged values, in float64, the donors in the order of the list, rounded once to fp32 (SPES, arXiv
2602.11543). The lists Q come with the certificate; `similarity.py` makes and checks them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.model.shards import MATRICES, expert_name, shard_experts
from spes_p2p.training.arrays import F32, U16, TensorLoader, Tensors
from spes_p2p.training.codecs import to_f32


def merge_shard(config: RunConfig, shard: int, lists: U16, strength: float, load: TensorLoader) -> Tensors:
    """Merged tensors of one shard, by name.

    lists: [layers, experts, K]. strength: alpha of this round. `load` gives unmerged fp32 tensors, of this shard and of
    its donors, one at a time, so that nobody has to hold all experts at once.
    """
    merged = {}
    for layer, expert, matrix in itertools.product(
        range(config.model.num_layers), shard_experts(shard, config.experts_per_shard), MATRICES
    ):
        name = expert_name(layer, expert, matrix)
        donors = [load(expert_name(layer, int(donor), matrix)) for donor in lists[layer, expert]]
        merged[name] = merge_tensor(load(name), donors, strength)
    return merged


def merge_tensor(own: F32, donors: Sequence[F32], strength: float) -> F32:
    """own + (strength / K) * sum of (donor - own), K = number of donors; a new array.

    Without donors, or with strength 0, it is `own` to the bit.
    """
    if not donors or strength == 0:
        return own.copy()
    wide_own = own.astype(np.float64)
    pull = np.zeros_like(own, dtype=np.float64)
    for donor in donors:
        wide_donor = donor.astype(np.float64)
        difference = np.subtract(wide_donor, wide_own, dtype=np.float64)
        pull = np.add(pull, difference, dtype=np.float64)
    factor = np.divide(np.float64(strength), np.float64(len(donors)), dtype=np.float64)
    step = np.multiply(pull, factor, dtype=np.float64)
    moved = np.add(wide_own, step, dtype=np.float64)
    return to_f32(moved, "merged expert")
