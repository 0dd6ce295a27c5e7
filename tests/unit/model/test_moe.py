import pytest
import torch
import torch.nn.functional as F

from spes_p2p.model.experts import OwnedExpert
from spes_p2p.model.moe import ExpertBank, Router
from spes_p2p.model.shards import MATRICES
from spes_p2p.testing.training import TINY_MODEL

NUM_TOKENS = 11
FORMATS = ["fp32", "bf16", "int8", "int4"]


def filled_bank(frozen_format="fp32", config=TINY_MODEL) -> ExpertBank:
    torch.manual_seed(1)
    bank = ExpertBank(config, frozen_format)
    for expert in bank.values():
        for matrix in MATRICES:
            expert.store_(matrix, torch.randn(expert.shape(matrix)) * 0.3)
    return bank


def router(**changes) -> Router:
    torch.manual_seed(2)
    return Router(TINY_MODEL.model_copy(update=changes))


def weights_of(expert) -> list[torch.Tensor]:
    if isinstance(expert, OwnedExpert):
        return [expert.gate, expert.up, expert.down]
    return [expert.decoded(matrix) for matrix in MATRICES]


def dense(bank: ExpertBank, x_TD, routing) -> torch.Tensor:
    """Every expert on every token, weighted by a full [T, M] matrix."""
    weights_TM = torch.zeros_like(routing.probs_TM).scatter(1, routing.experts_TK, routing.weights_TK)
    outputs = []
    for expert in bank.values():
        gate, up, down = weights_of(expert)
        outputs.append((F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T)
    return (torch.stack(outputs, dim=1) * weights_TM.unsqueeze(-1)).sum(dim=1)


@pytest.mark.parametrize("frozen_format", FORMATS)
@pytest.mark.parametrize("owned", [(), (1, 3), (0, 1, 2, 3)])
def test_sparse_and_dense_agree_forward_and_backward(owned, frozen_format):
    bank, route = filled_bank(frozen_format), router()
    bank.set_owned(owned)
    x_TD = torch.randn(NUM_TOKENS, 16, requires_grad=True)
    direction = torch.randn(NUM_TOKENS, 16)
    results = []
    for forward in (bank, lambda x, routing: dense(bank, x, routing)):
        bank.zero_grad()
        route.zero_grad()
        x_TD.grad = None
        y_TD = forward(x_TD, route(x_TD))
        (y_TD * direction).sum().backward()
        own = [weight.grad.clone() for j in owned for weight in weights_of(bank[str(j)])]
        results.append([y_TD.detach(), x_TD.grad.clone(), route.router.weight.grad.clone(), *own])
    for sparse, plain in zip(*results, strict=True):
        torch.testing.assert_close(sparse, plain, rtol=1e-5, atol=2e-6)


def test_frozen_experts_have_buffers_and_no_parameters():
    bank = filled_bank("int8")
    bank.set_owned((2,))
    assert {name for name, _ in bank.named_parameters()} == {"2.gate", "2.up", "2.down"}
    assert len(list(bank.buffers())) == 9 * 2


def test_parameters_that_stay_owned_keep_their_identity():
    bank = filled_bank()
    bank.set_owned((1, 2))
    before = bank["2"].gate
    bank.set_owned((2, 3))
    assert bank["2"].gate is before
    assert [isinstance(bank[str(j)], OwnedExpert) for j in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("frozen_format", FORMATS)
def test_an_expert_that_changes_sides_keeps_its_values(frozen_format):
    bank = filled_bank(frozen_format)
    before = [bank.expert(1).decoded(matrix) for matrix in MATRICES]
    for owned in ((1,), ()):
        bank.set_owned(owned)
        for matrix, values in zip(MATRICES, before, strict=True):
            assert torch.equal(bank.expert(1).decoded(matrix), values)


def test_an_expert_without_tokens_is_not_called():
    bank, route = filled_bank(), router()
    bank.set_owned((0, 1, 2, 3))
    with torch.no_grad():
        route.router.weight.zero_()
        route.router.weight[1:3, 0] = 1.0
    x_TD = torch.ones(NUM_TOKENS, 16)
    routing = route(x_TD)
    bank(x_TD, routing).sum().backward()
    assert routing.counts_M.tolist() == [0, NUM_TOKENS, NUM_TOKENS, 0]
    assert bank["0"].gate.grad is None
    assert bank["1"].gate.grad is not None


def test_normalised_weights_add_up_to_one_and_plain_ones_are_probabilities():
    x_TD = torch.randn(NUM_TOKENS, 16)
    normalised, plain = router()(x_TD), router(norm_topk_prob=False)(x_TD)
    torch.testing.assert_close(normalised.weights_TK.sum(dim=1), torch.ones(NUM_TOKENS))
    assert torch.equal(plain.weights_TK, plain.probs_TM.gather(1, plain.experts_TK))


def test_routing_takes_the_most_probable_experts_of_all():
    routing = router()(torch.randn(NUM_TOKENS, 16))
    torch.testing.assert_close(routing.probs_TM, routing.logits_TM.softmax(dim=1))
    best = routing.probs_TM.sort(dim=1, descending=True).indices[:, :2]
    assert torch.equal(routing.experts_TK, best)
    assert int(routing.counts_M.sum()) == NUM_TOKENS * 2


def test_bf16_activations_are_routed_in_fp32():
    assert router()(torch.randn(NUM_TOKENS, 16).bfloat16()).probs_TM.dtype == torch.float32
