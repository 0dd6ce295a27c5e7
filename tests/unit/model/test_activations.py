"""What a layer keeps for its backward pass, and what it keeps under checkpointing."""

import pytest
import torch

from spes_p2p.config import ModelConfig
from spes_p2p.model.attention import RMSNorm
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.saved import saved_bytes
from spes_p2p.testing.training import TINY_MODEL


def model_of(config: ModelConfig) -> Transformer:
    model = Transformer.build(config)
    model.load(initial_psi(config, 0))
    model.load(initial_shard(config, config.num_experts, 0, 0))
    model.set_owned((0, 2))
    return model


def tokens(config: ModelConfig, length: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(3))


def step(model: Transformer, checkpoint_layers: bool) -> list[torch.Tensor]:
    tokens_BT1 = tokens(model.config, 12)
    losses, routings = model.losses(tokens_BT1[:, :-1], tokens_BT1[:, 1:], 1e-4, checkpoint_layers=checkpoint_layers)
    router_terms = sum(routing.probs_TM[:, 0].square().sum() for routing in routings)
    (losses.total + router_terms).backward()
    return [losses.total.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_checkpointing_changes_no_bit(qk_norm):
    config = TINY_MODEL.model_copy(update={"qk_norm": qk_norm})
    plain, checkpointed = step(model_of(config), False), step(model_of(config), True)
    assert len(plain) > 20
    for ours, theirs in zip(checkpointed, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpointed_layer_keeps_its_input_and_its_routing():
    config = ModelConfig(
        vocab_size=64, width=64, num_layers=3, num_heads=4, num_kv_heads=2, num_experts=4, top_k=2, expert_width=64
    )
    model = model_of(config)
    tokens_BT = tokens(config, 32)[:, :-1]

    def kept(num_layers: int) -> int:
        model.layers = model.layers[:num_layers]
        tables = model._rotary(32, torch.device("cpu"))
        held = (*model.tensors().values(), *tables, tokens_BT)
        return saved_bytes(lambda: model.hidden(tokens_BT, checkpoint_layers=True), held)

    assert kept(3) - kept(2) == 4 * 64 * tokens_BT.numel()


@pytest.mark.parametrize("qk_norm", ["head", "full"])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_attention_keeps_input_norm_and_each_of_q_k_v_but_no_second_copy_of_a_norm(qk_norm, num_kv_heads):
    config = ModelConfig(
        vocab_size=64, width=256, num_layers=1, num_heads=4, num_kv_heads=num_kv_heads, num_experts=4, top_k=2,
        expert_width=8, qk_norm=qk_norm,
    )  # fmt: skip
    model = model_of(config)
    layer, (cos_TH, sin_TH) = model.layers[0], model._rotary(64, torch.device("cpu"))
    x_BTD = torch.randn(2, 64, 256, requires_grad=True)

    def forward() -> torch.Tensor:
        return layer.attention(layer.attention_norm(x_BTD), cos_TH, sin_TH)

    q_width, k_width = 256, num_kv_heads * 64
    # x, norm(x); q and k before and after norm and rotation; v; what attention gives
    values = 2 * 256 + 2 * (q_width + k_width) + k_width + q_width
    per_head_norms = config.num_heads + num_kv_heads if qk_norm == "head" else 2
    row_numbers = 1 + per_head_norms + config.num_heads  # 1/rms of each norm, logsumexp of each head
    held = (*model.tensors().values(), cos_TH, sin_TH)
    assert saved_bytes(forward, held) == 4 * x_BTD[..., 0].numel() * (values + row_numbers)


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 4, 6)])
def test_norm_has_the_gradients_of_finite_differences(shape):
    norm = RMSNorm(6, 1e-2).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)), (x, weight)
    )


def test_norm_of_bf16_keeps_the_bf16_input_and_one_number_per_row():
    norm, x = RMSNorm(64, 1e-6), torch.randn(5, 64).bfloat16().requires_grad_()
    assert saved_bytes(lambda: norm(x), (norm.weight,)) == 2 * 5 * 64 + 4 * 5
