import math

import pytest

from spes_p2p.config import ModelConfig
from spes_p2p.model import shards
from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.training import TINY_MODEL

SPES_1B = ModelConfig(
    vocab_size=151_665,
    width=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    num_experts=16,
    top_k=2,
    expert_width=2048,
)
SPES_7B = ModelConfig(
    vocab_size=151_665,
    width=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    num_experts=32,
    top_k=4,
    expert_width=2048,
)
SPES_9B = ModelConfig(
    vocab_size=151_936,
    width=2048,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    top_k=2,
    expert_width=6144,
)


@pytest.mark.parametrize(
    ("config", "psi_billions", "expert_millions", "total_billions"),
    [(SPES_1B, 0.261, 4.72, 1.167), (SPES_7B, 0.891, 12.58, 7.333), (SPES_9B, 0.975, 37.75, 9.431)],
)
def test_published_shapes_have_the_published_sizes(config, psi_billions, expert_millions, total_billions):
    psi, expert = shards.num_psi_values(config), shards.num_expert_values(config)
    assert round(psi / 1e9, 3) == psi_billions
    assert round(expert / 1e6, 2) == expert_millions
    assert round((psi + config.num_layers * config.num_experts * expert) / 1e9, 3) == total_billions


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_names_and_shapes_are_those_of_the_transformer(qk_norm):
    config = TINY_MODEL.model_copy(update={"qk_norm": qk_norm})
    model = Transformer.build(config)
    experts = {
        shards.expert_name(layer, expert, matrix): shape
        for layer in range(config.num_layers)
        for expert in range(config.num_experts)
        for matrix, shape in shards.expert_shapes(config).items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in model.psi().items()} == shards.psi_shapes(config)
    assert {name: tuple(tensor.shape) for name, tensor in model.tensors().items()} == shards.psi_shapes(
        config
    ) | experts


def test_psi_is_sorted_by_name():
    names = list(shards.psi_shapes(ModelConfig(num_layers=12)))
    assert names == sorted(names)


def test_expert_names_are_parsed_back():
    assert shards.parse_expert_name(shards.expert_name(10, 3, "down")) == (10, 3, "down")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.experts.1.gate.weight",
        "layers.0.experts.1",
        "layers.00.experts.1.up",
        "layers.0.moe.router.weight",
        " layers.0.experts.1.up",
        "layers.0.experts.-1.up",
        "layers.0.experts.1.up\n",
    ],
)
def test_other_names_are_not_experts(name):
    assert shards.parse_expert_name(name) is None


def test_shards_partition_the_experts():
    config = TINY_MODEL
    names = [name for shard in range(2) for name in shards.shard_tensor_names(config, 2, shard)]
    assert len(set(names)) == len(names) == config.num_layers * config.num_experts * 3
    assert list(shards.shard_experts(1, 2)) == [2, 3]
    assert [shards.shard_of_expert(expert, 2) for expert in range(4)] == [0, 0, 1, 1]


def test_tensors_of_a_shard_stand_by_layer_expert_and_matrix():
    assert shards.shard_tensor_names(TINY_MODEL, 2, 0)[:7] == (
        "layers.0.experts.0.gate",
        "layers.0.experts.0.up",
        "layers.0.experts.0.down",
        "layers.0.experts.1.gate",
        "layers.0.experts.1.up",
        "layers.0.experts.1.down",
        "layers.1.experts.0.gate",
    )


def test_size_of_a_shard_is_the_sum_of_its_tensors():
    shapes = shards.expert_shapes(TINY_MODEL)
    names = shards.shard_tensor_names(TINY_MODEL, 2, 1)
    assert shards.num_shard_values(TINY_MODEL, 2) == sum(math.prod(shapes[name.rsplit(".", 1)[1]]) for name in names)
