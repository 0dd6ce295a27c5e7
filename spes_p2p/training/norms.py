"""Squared norms of decoded deltas, as senders state them and ackers check them.

They travel as float64 and are compared within 1e-6, because a sum may round differently elsewhere: numpy's pairwise
float64 sum of each tensor in memory order, then the tensors' sums in the order of the blob.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from spes_p2p.config import RunConfig
from spes_p2p.training.arrays import Bytes, TensorLoader
from spes_p2p.training.codecs import expert_values, open_expert_blob

NORM_TOLERANCE = 1e-6
"""Relative."""


def squared_norm(values: npt.NDArray[Any]) -> float:
    """Sum of squares in float64."""
    wide = values.astype(np.float64, copy=False)
    return float(np.sum(np.square(wide), dtype=np.float64))


def expert_squared_norm(config: RunConfig, shard: int, data: Bytes, base: TensorLoader) -> float:
    """Squared norm of (value of the blob - value of its base row), over all tensors of the shard.

    NaN or infinite if the blob has such values. Raises SchemaError if `data` is not a blob of this shard.
    """
    total = 0.0
    for name, raw in open_expert_blob(config, shard, data).items():
        wide = expert_values(raw).astype(np.float64)
        total += squared_norm(wide - base(name).astype(np.float64))
    return total


def norms_agree(stated: float, own: float) -> bool:
    """Whether a stated squared norm is the own one within the tolerance. NaN and infinities agree with nothing."""
    if not (math.isfinite(stated) and math.isfinite(own)) or stated < 0:
        return False
    return abs(stated - own) <= NORM_TOLERANCE * own
