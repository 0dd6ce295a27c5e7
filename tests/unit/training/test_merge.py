"""The merge warm-up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.config import MergeConfig, ModelConfig, RunConfig, TrainingConfig
from spes_p2p.model.shards import MATRICES, expert_name, expert_shapes, parse_expert_name
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.merge import merge_shard, merge_tensor
from spes_p2p.training.similarity import merge_lists

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=6, expert_width=4)


def run(top_k: int = 2, experts_per_shard: int = 1) -> RunConfig:
    training = TrainingConfig(merge=MergeConfig(top_k=top_k))
    return RunConfig(model=MODEL, training=training, experts_per_shard=experts_per_shard)


def experts(seed: int = 0) -> Tensors:
    generator = np.random.default_rng(seed)
    return {
        expert_name(layer, expert, matrix): generator.standard_normal(shape).astype(np.float32)
        for layer in range(MODEL.num_layers)
        for expert in range(MODEL.num_experts)
        for matrix, shape in expert_shapes(MODEL).items()
    }


def merge_all(config: RunConfig, tensors: Tensors, strength: float) -> Tensors:
    lists = merge_lists(config, tensors.__getitem__)
    merged: Tensors = {}
    for shard in range(config.num_shards):
        merged |= merge_shard(config, shard, lists, strength, tensors.__getitem__)
    return merged


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_alpha_zero_is_the_identity() -> None:
    tensors = experts()
    tensors["layers.0.experts.0.up"][0, :2] = (-0.0, 1e-45)
    assert same_bits(merge_all(run(), tensors, 0.0), tensors)


def test_equal_experts_do_not_move() -> None:
    first = experts()
    equal = {}
    for name in first:
        parsed = parse_expert_name(name)
        assert parsed is not None
        equal[name] = first[expert_name(parsed[0], 0, parsed[2])]
    assert same_bits(merge_all(run(), equal, 0.1), equal)


def test_all_others_as_donors_keep_the_sum_of_all_experts() -> None:
    tensors = experts()
    merged = merge_all(run(top_k=5), tensors, 0.1)
    for layer in range(MODEL.num_layers):
        for matrix in MATRICES:
            names = [expert_name(layer, expert, matrix) for expert in range(MODEL.num_experts)]
            before = np.sum([tensors[name].astype(np.float64) for name in names], axis=0)
            after = np.sum([merged[name].astype(np.float64) for name in names], axis=0)
            np.testing.assert_allclose(after, before, atol=1e-6)
            assert all(merged[name].tobytes() != tensors[name].tobytes() for name in names)


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(6)), seed=st.integers(0, 1000))
def test_permuting_the_experts_permutes_the_result(order: list[int], seed: int) -> None:
    tensors = experts(seed)

    def permuted(source: Tensors) -> Tensors:
        return {
            expert_name(layer, new, matrix): source[expert_name(layer, old, matrix)]
            for layer in range(MODEL.num_layers)
            for new, old in enumerate(order)
            for matrix in MATRICES
        }

    assert same_bits(merge_all(run(), permuted(tensors), 0.1), permuted(merge_all(run(), tensors, 0.1)))


def test_dictionary_order_changes_no_bit() -> None:
    tensors = experts()
    assert same_bits(merge_all(run(), dict(reversed(tensors.items())), 0.1), merge_all(run(), tensors, 0.1))


def test_every_matrix_moves_toward_the_same_matrix_of_its_donors() -> None:
    tensors = experts()
    config = run()
    lists = merge_lists(config, tensors.__getitem__)
    merged = merge_all(config, tensors, 0.3)
    for layer in range(MODEL.num_layers):
        for expert in range(MODEL.num_experts):
            for matrix in MATRICES:
                own = tensors[expert_name(layer, expert, matrix)].astype(np.float64)
                donors = [tensors[expert_name(layer, int(k), matrix)].astype(np.float64) for k in lists[layer, expert]]
                wanted = 0.7 * own + 0.3 * np.mean(donors, axis=0)
                np.testing.assert_allclose(merged[expert_name(layer, expert, matrix)], wanted, atol=1e-6)


def test_all_experts_merge_at_once_from_unmerged_values() -> None:
    tensors = experts()
    config = run(experts_per_shard=3)
    lists = merge_lists(config, tensors.__getitem__)
    second = merge_shard(config, 1, lists, 0.1, tensors.__getitem__)
    merge_shard(config, 0, lists, 0.1, tensors.__getitem__)
    assert same_bits(second, merge_shard(config, 1, lists, 0.1, tensors.__getitem__))


def test_a_shard_is_merged_without_reading_experts_that_are_no_donors() -> None:
    tensors = experts()
    config = run()
    lists = merge_lists(config, tensors.__getitem__)
    read: set[int] = set()

    def load(name: str) -> np.ndarray:
        parsed = parse_expert_name(name)
        assert parsed is not None
        read.add(parsed[1])
        return tensors[name]

    merge_shard(config, 2, lists, 0.1, load)
    assert read == {2} | {int(k) for k in lists[:, 2].reshape(-1)}


def test_the_result_is_rounded_once() -> None:
    own, donor = np.array([1.0], np.float32), np.array([1.0 + 2**-22], np.float32)
    assert merge_tensor(own, [donor], 0.5).tolist() == [1 + 2**-23]
    assert merge_tensor(own, [donor, donor, donor], 0.1).tolist() == [1.0]


def test_a_single_expert_has_no_donors_and_stays() -> None:
    own = np.array([-0.0, 2.0], np.float32)
    assert merge_tensor(own, [], 0.1).tobytes() == own.tobytes()


@pytest.mark.parametrize("experts_per_shard", [1, 2, 3, 6])
def test_the_cut_into_shards_changes_no_bit(experts_per_shard: int) -> None:
    tensors = experts()
    assert same_bits(merge_all(run(2, experts_per_shard), tensors, 0.1), merge_all(run(2, 1), tensors, 0.1))
