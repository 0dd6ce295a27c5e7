import math

import pytest
import torch

from spes_p2p.config import TrainingConfig
from spes_p2p.model.moe import Routing
from spes_p2p.training.losses import batch_losses, layer_balance, owned_count_scale


def routing(experts_TK, logits_TM) -> Routing:
    probs_TM = logits_TM.softmax(dim=-1)
    counts_M = torch.bincount(experts_TK.flatten(), minlength=logits_TM.shape[1])
    return Routing(logits_TM, probs_TM, probs_TM.gather(1, experts_TK), experts_TK, counts_M)


def balanced(num_experts: int = 4) -> Routing:
    experts_TK = torch.arange(num_experts).view(-1, 1)
    return routing(experts_TK, torch.zeros(num_experts, num_experts))


def test_balance_is_one_when_all_experts_get_the_same():
    assert layer_balance(balanced()).item() == pytest.approx(1.0)


def test_balance_is_m_when_one_expert_gets_everything():
    logits_TM = torch.full((5, 4), -1e4)
    logits_TM[:, 2] = 0
    assert layer_balance(routing(torch.full((5, 1), 2), logits_TM)).item() == pytest.approx(4.0)


def test_balance_counts_slots_over_tokens_times_k():
    experts_TK = torch.tensor([[0, 1], [0, 2], [0, 1]])
    logits_TM = torch.tensor([[1.0, 0.5, 0.0, -1.0], [0.3, 0.0, 0.2, 0.1], [2.0, 1.0, 0.0, 0.0]])
    share = [3 / 6, 2 / 6, 1 / 6, 0.0]
    mean = logits_TM.softmax(-1).mean(0).tolist()
    expected = 4 * sum(f * p for f, p in zip(share, mean, strict=True))
    assert layer_balance(routing(experts_TK, logits_TM)).item() == pytest.approx(expected)


def test_balance_has_a_gradient_through_the_probabilities_alone():
    logits_TM = torch.zeros(4, 4, requires_grad=True)
    layer_balance(routing(torch.zeros(4, 1, dtype=torch.int64), logits_TM)).backward()
    assert (logits_TM.grad[:, 0] > 0).all()
    assert (logits_TM.grad[:, 1:] < 0).all()


def test_total_is_the_weighted_sum_of_the_formula():
    torch.manual_seed(0)
    config = TrainingConfig(z_loss=0.3, balance_loss=0.5, router_z_loss=0.7)
    logits_TV, targets_T = torch.randn(6, 9), torch.randint(0, 9, (6,))
    layers = [routing(torch.randint(0, 4, (6, 2)), torch.randn(6, 4)) for _ in range(3)]
    parts = batch_losses(logits_TV, targets_T, layers, config)

    cross_entropy = -sum(logits_TV.log_softmax(-1)[t, targets_T[t]].item() for t in range(6)) / 6
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits_TV.tolist()) / 6
    balance = sum(layer_balance(layer).item() for layer in layers) / 3
    router_z = sum(
        sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in layer.logits_TM.tolist()) / 6 for layer in layers
    )
    assert parts.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-5)
    assert parts.z.item() == pytest.approx(z, rel=1e-5)
    assert parts.balance.item() == pytest.approx(balance, rel=1e-5)
    assert parts.router_z.item() == pytest.approx(router_z, rel=1e-5)
    expected = cross_entropy + 0.3 * z + 0.5 * balance + 0.7 * router_z
    assert parts.total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("step", "scale"), [(0, 0.7), (10, 0.85), (20, 1.0), (90, 1.0)])
def test_decayed_balance_rises_to_one_over_a_fifth_of_the_steps(step, scale):
    owned_M = torch.tensor([True, False, True, False])
    expected = torch.tensor([scale, 1.0, scale, 1.0])
    torch.testing.assert_close(owned_count_scale(owned_M, step, 100), expected)


def test_decayed_balance_scales_the_counts_of_owned_experts():
    scale_M = owned_count_scale(torch.tensor([True, False, False, False]), 0, 100)
    assert layer_balance(balanced(), scale_M).item() == pytest.approx((0.7 + 3) / 4)
