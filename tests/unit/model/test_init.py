import numpy as np

from spes_p2p.config import ModelConfig
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.shards import psi_shapes, shard_tensor_names
from spes_p2p.testing.training import TINY_MODEL


def test_same_seed_gives_the_same_bits():
    first, second = initial_psi(TINY_MODEL, 7), initial_psi(TINY_MODEL, 7)
    assert all(first[name].tobytes() == second[name].tobytes() for name in psi_shapes(TINY_MODEL))


def test_seeds_and_names_give_different_values():
    shard = initial_shard(TINY_MODEL, 1, 0, 0)
    assert not np.array_equal(shard["layers.0.experts.0.gate"], shard["layers.0.experts.0.up"])
    assert not np.array_equal(
        shard["layers.0.experts.0.gate"], initial_shard(TINY_MODEL, 1, 1, 0)["layers.0.experts.0.gate"]
    )


def test_an_expert_does_not_depend_on_how_experts_are_cut_into_shards():
    wide = initial_shard(TINY_MODEL, 2, 3, 1)
    narrow = initial_shard(TINY_MODEL, 1, 3, 2) | initial_shard(TINY_MODEL, 1, 3, 3)
    assert tuple(wide) == shard_tensor_names(TINY_MODEL, 2, 1)
    assert all(np.array_equal(wide[name], narrow[name]) for name in wide)


def test_weights_are_normal_with_deviation_002_cut_at_three_sigma():
    values = initial_psi(ModelConfig(), 0)["head.weight"]
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 0.06 * (1 + 1e-6)
    # a normal distribution cut at 3 sigma keeps 0.98658 of its deviation
    assert abs(values.std() - 0.02 * 0.98658) < 2e-4
    assert abs(values.mean()) < 5e-4


def test_norms_begin_as_ones():
    psi = initial_psi(TINY_MODEL, 0)
    assert all((psi[name] == 1).all() for name in psi if len(psi[name].shape) == 1)
