"""Lists of the most similar experts, made and checked."""

import numpy as np
import pytest

from spes_p2p.config import MergeConfig, ModelConfig, RunConfig, TrainingConfig
from spes_p2p.errors import SchemaError
from spes_p2p.model.init import initial_shard
from spes_p2p.model.shards import expert_name
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.similarity import (
    decode_lists,
    encode_lists,
    layer_cosines,
    lists_problem,
    lists_shape,
    merge_lists,
    rank_most_similar,
)

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=5, expert_width=4)


def run(top_k: int = 2, model: ModelConfig = MODEL) -> RunConfig:
    return RunConfig(model=model, training=TrainingConfig(merge=MergeConfig(top_k=top_k)))


def experts(model: ModelConfig = MODEL) -> Tensors:
    tensors: Tensors = {}
    for shard in range(model.num_experts):
        tensors |= initial_shard(model, 1, 7, shard)
    return tensors


def test_cosines_are_those_of_the_gate_matrices() -> None:
    tensors = experts()
    cosines = layer_cosines(run(), 1, tensors.__getitem__)
    for j in range(5):
        for k in range(5):
            one = tensors[expert_name(1, j, "gate")].reshape(-1).astype(np.float64)
            other = tensors[expert_name(1, k, "gate")].reshape(-1).astype(np.float64)
            wanted = (one * other).sum() / np.sqrt((one * one).sum() * (other * other).sum())
            assert cosines[j, k] == pytest.approx(wanted, abs=1e-12)


def test_the_most_similar_come_first_and_ties_go_to_the_lower_index() -> None:
    cosines = np.array(
        [
            [1.0, 0.5, 0.5, 0.9],
            [0.5, 1.0, 0.2, 0.2],
            [0.5, 0.2, 1.0, 0.7],
            [0.9, 0.2, 0.7, 1.0],
        ]
    )
    assert rank_most_similar(cosines, 2).tolist() == [[3, 1], [0, 2], [3, 0], [0, 2]]


def test_equal_experts_tie_in_spite_of_rounding() -> None:
    tensors = experts()
    for expert in range(1, 5):
        tensors[expert_name(0, expert, "gate")] = tensors[expert_name(0, 0, "gate")] * np.float32(1 + expert / 3)
    assert merge_lists(run(), tensors.__getitem__)[0].tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_an_expert_of_zeros_is_like_nobody() -> None:
    tensors = experts()
    tensors[expert_name(0, 3, "gate")] = np.zeros((4, 8), np.float32)
    cosines = layer_cosines(run(), 0, tensors.__getitem__)
    assert cosines[3].tolist() == [0.0] * 5


def test_there_are_never_more_donors_than_other_experts() -> None:
    assert lists_shape(run(top_k=4)) == (2, 5, 4)
    assert lists_shape(run(top_k=9)) == (2, 5, 4)
    alone = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=1, top_k=1, expert_width=4)
    config = run(model=alone)
    lists = merge_lists(config, experts(alone).__getitem__)
    assert lists.shape == (2, 1, 0)
    assert lists_problem(config, encode_lists(lists), experts(alone).__getitem__) is None


def test_lists_travel_as_little_endian_uint16() -> None:
    config = run(top_k=1)
    lists = np.array([[[1], [0], [1], [2], [3]], [[4], [0], [0], [0], [0]]], dtype=np.uint16)
    data = encode_lists(lists)
    assert data[:4] == b"\x01\x00\x00\x00"
    assert decode_lists(config, data).tolist() == lists.tolist()


def changed(lists: np.ndarray, donors: list[int]) -> bytes:
    other = lists.copy()
    other[1, 2] = donors
    return encode_lists(other)


def test_malformed_lists_are_refused() -> None:
    config = run()
    lists = merge_lists(config, experts().__getitem__)
    for data in (changed(lists, [2, 1]), changed(lists, [1, 1]), changed(lists, [1, 5]), encode_lists(lists)[:-2], b""):
        with pytest.raises(SchemaError, match="merge lists"):
            decode_lists(config, data)
        assert lists_problem(config, data, experts().__getitem__) is not None


def test_own_lists_are_accepted_and_a_less_similar_donor_is_not() -> None:
    config, tensors = run(), experts()
    lists = merge_lists(config, tensors.__getitem__)
    assert lists_problem(config, encode_lists(lists), tensors.__getitem__) is None
    left_out = sorted(set(range(5)) - {2} - {int(k) for k in lists[1, 2]})
    reason = lists_problem(config, changed(lists, [int(lists[1, 2, 0]), left_out[0]]), tensors.__getitem__)
    assert reason == "merge lists: layer 1, expert 2: a more similar expert is left out"


def test_a_list_within_the_tolerance_is_accepted() -> None:
    config, tensors = run(top_k=1), experts()
    base = tensors[expert_name(0, 0, "gate")]
    for expert in range(1, 5):
        tensors[expert_name(0, expert, "gate")] = base.copy()
    tensors[expert_name(0, 4, "gate")][0, 0] *= np.float32(1.001)
    lists = merge_lists(config, tensors.__getitem__)
    assert lists[0, 0].tolist() == [1]
    other = lists.copy()
    other[0, 0] = [4]
    assert lists_problem(config, encode_lists(other), tensors.__getitem__) is None
