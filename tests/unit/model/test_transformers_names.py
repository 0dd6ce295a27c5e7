"""Transformers' own models, made from a checkpoint folder with our names, compute what ours compute."""

import json

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from spes_p2p.config import ModelConfig
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.shards import MATRICES, parse_expert_name, psi_shapes, shard_tensor_names
from spes_p2p.model.transformer import Transformer, to_torch
from spes_p2p.model.transformers_names import transformers_config, transformers_name
from spes_p2p.testing.training import TINY_MODEL

OLMOE = ModelConfig(
    vocab_size=99, width=32, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=6, top_k=2, expert_width=24,
    qk_norm="full", norm_topk_prob=False, rms_norm_eps=1e-5, rope_theta=500.0,
)  # fmt: skip
QWEN = OLMOE.model_copy(update={"qk_norm": "head", "head_dim": 12, "norm_topk_prob": True, "rope_theta": 10_000.0})
OWNED = (1, 4)


def random_weights(config: ModelConfig):
    """Initial ones and noise of five times their size, so that every matrix counts and norms' weights differ."""
    generator = torch.Generator().manual_seed(5)
    weights = initial_psi(config, 0) | initial_shard(config, config.num_experts, 0, 0)
    return {
        name: to_torch(values) + 0.1 * torch.randn(values.shape, generator=generator)
        for name, values in weights.items()
    }


def theirs(config: ModelConfig, weights, folder):
    """Loaded from files, as a user would."""
    transformers = pytest.importorskip("transformers")
    named = {transformers_name(name): values.contiguous() for name, values in weights.items()}
    safetensors.torch.save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(transformers_config(config, 64)))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model


def their_gradient(model, name: str) -> torch.Tensor:
    """Gradient of one of our tensors: Transformers stacks gate and up of all experts of a layer in memory."""
    parsed = parse_expert_name(name)
    if parsed is None:
        return model.get_parameter(transformers_name(name)).grad
    layer, expert, matrix = parsed
    experts = model.model.layers[layer].mlp.experts
    if matrix == "down":
        return experts.down_proj.grad[expert]
    return experts.gate_up_proj.grad[expert].chunk(2)[MATRICES.index(matrix)]


@pytest.mark.parametrize(("family", "config"), [("OlmoeForCausalLM", OLMOE), ("Qwen3MoeForCausalLM", QWEN)])
@pytest.mark.parametrize("owned", [OWNED, tuple(range(6))])
def test_logits_loss_and_gradients_are_those_of_transformers(family, config, owned, tmp_path):
    weights = random_weights(config)
    peer = theirs(config, weights, tmp_path)
    assert type(peer).__name__ == family
    model = Transformer.build(config)
    model.set_owned(owned)
    model.load({name: values.numpy() for name, values in weights.items()})
    tokens_BT = torch.randint(0, 99, (3, 20), generator=torch.Generator().manual_seed(3))

    logits_BTV, _ = model(tokens_BT)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    output = peer(input_ids=tokens_BT, labels=tokens_BT)
    output.loss.backward()

    torch.testing.assert_close(logits_BTV, output.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(loss, output.loss, rtol=0, atol=1e-5)
    trained = model.psi() | model.owned()
    assert len(trained) == len(psi_shapes(config)) + 2 * 3 * len(owned)
    for name, weight in trained.items():
        torch.testing.assert_close(weight.grad, their_gradient(peer, name), rtol=1e-4, atol=1e-5, msg=name)


def test_every_tensor_has_a_name_of_its_own():
    names = [*psi_shapes(TINY_MODEL), *shard_tensor_names(TINY_MODEL, 4, 0)]
    assert len({transformers_name(name) for name in names}) == len(names)
    assert transformers_name("layers.1.experts.3.up") == "model.layers.1.mlp.experts.3.up_proj.weight"
    assert transformers_name("layers.0.moe.router.weight") == "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("name", ["layers.0.experts.1.side", "layers.0.attention", "model.norm.weight", ""])
def test_other_names_are_refused(name):
    with pytest.raises(KeyError):
        transformers_name(name)


def test_an_olmoe_cannot_have_heads_of_another_width():
    with pytest.raises(ValueError, match="4 heads of 12 are not 32"):
        transformers_config(QWEN.model_copy(update={"qk_norm": "full"}), 64)
