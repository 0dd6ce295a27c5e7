"""Weights before any training: normal with deviation 0.02, cut at 3 deviations; norms are ones.

Each tensor has its own generator, seeded by (run seed, name): the bits depend neither on the order in which tensors
are made, nor on the number of threads, nor on which shards a machine makes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spes_p2p.config import ModelConfig
from spes_p2p.digests import digest
from spes_p2p.model.shards import psi_shapes, shard_shapes

INIT_STD = 0.02
CUT_SIGMAS = 3.0

Tensors = dict[str, npt.NDArray[np.float32]]


def initial_psi(config: ModelConfig, seed: int) -> Tensors:
    """The shared modules at genesis, sorted by name."""
    return {
        name: np.ones(shape, dtype=np.float32) if name.endswith("norm.weight") else _truncated_normal(seed, name, shape)
        for name, shape in psi_shapes(config).items()
    }


def initial_shard(config: ModelConfig, experts_per_shard: int, seed: int, shard: int) -> Tensors:
    """The tensors of one expert shard at genesis, in the order of `shard_tensor_names`."""
    shapes = shard_shapes(config, experts_per_shard, shard)
    return {name: _truncated_normal(seed, name, shape) for name, shape in shapes.items()}


def _truncated_normal(seed: int, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    key = int.from_bytes(digest("spes init", seed, name.encode())[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    values = generator.standard_normal(shape, dtype=np.float64)
    outside = np.abs(values) > CUT_SIGMAS
    while outside.any():
        values[outside] = generator.standard_normal(int(outside.sum()), dtype=np.float64)
        outside = np.abs(values) > CUT_SIGMAS
    return (values * INIT_STD).astype(np.float32)
