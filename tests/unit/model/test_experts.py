"""Both ways to compute a layer's experts: the loop, and grouped_mm, which also runs on CPUs (slowly)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spes_p2p.config import ModelConfig
from spes_p2p.model import expert_grouped
from spes_p2p.model.expert_grouped import grouped_experts
from spes_p2p.model.expert_loop import looped_experts
from spes_p2p.model.experts import FrozenExpert, OwnedExpert
from spes_p2p.model.moe import ExpertBank, Routing
from spes_p2p.model.shards import MATRICES
from spes_p2p.model.slots import BankCall, sort_slots

# grouped_mm wants rows that begin at multiples of 16 bytes
MODEL = ModelConfig(width=16, num_layers=1, num_heads=2, num_kv_heads=1, num_experts=5, top_k=2, expert_width=24)
NUM_TOKENS = 13
OWNED = (0, 3, 4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WAYS = [looped_experts, grouped_experts]


def bank_of(frozen_format="fp32", owned=OWNED) -> ExpertBank:
    torch.manual_seed(1)
    bank = ExpertBank(MODEL, frozen_format)
    for expert in bank.values():
        for matrix in MATRICES:
            expert.store_(matrix, torch.randn(expert.shape(matrix)) * 0.3)
    bank.set_owned(owned)
    return bank


def routed(num_experts=4) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts_TK, weights_TK): the last expert of the five gets no token."""
    generator = torch.Generator().manual_seed(2)
    experts_TK = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(NUM_TOKENS)])
    return experts_TK, torch.rand(NUM_TOKENS, 2, generator=generator)


@contextmanager
def saving() -> Iterator[list[torch.Tensor]]:
    """The tensors that are kept for a backward pass."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def call_of(bank, experts_TK, dtype=torch.float32, keep=True) -> BankCall:
    counts_M = torch.bincount(experts_TK.flatten(), minlength=MODEL.num_experts)
    slots = sort_slots(experts_TK, counts_M)
    return BankCall(experts=list(bank.values()), slots=slots, dtype=dtype, keep=keep)


def inputs(seed=3, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(NUM_TOKENS, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(way, bank, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    """[y, gradient of x, of the routing weights, of the owned weights that have one]."""
    bank.zero_grad()
    experts_TK, weights_TK = (tensor.to(device) for tensor in routed())
    x_TD, weights_TK = inputs().to(device).requires_grad_(), weights_TK.requires_grad_()
    y_TD = way(call_of(bank, experts_TK, dtype), x_TD, weights_TK)
    (y_TD * inputs(4).to(device)).sum().backward()
    own = [weight.grad for weight in bank.parameters() if weight.grad is not None]
    return [y_TD.detach(), x_TD.grad, weights_TK.grad, *own]


def test_gradients_are_those_of_finite_differences():
    bank = bank_of().double()
    experts_TK, weights_TK = routed()
    call = call_of(bank, experts_TK, torch.float64)
    x_TD = inputs(dtype=torch.float64).requires_grad_()
    weights_TK = weights_TK.double().requires_grad_()
    owned = [weight for name, weight in bank.named_parameters() if not name.startswith("4.")]
    # the weights are read from the experts: autograd only has to see them
    assert torch.autograd.gradcheck(
        lambda x, w, *_: looped_experts(call, x, w), (x_TD, weights_TK, *owned), fast_mode=True
    )


@pytest.mark.parametrize("frozen_format", ["fp32", "bf16", "int8", "int4"])
def test_both_ways_agree(frozen_format):
    bank = bank_of(frozen_format)
    looped, grouped = (run(way, bank) for way in WAYS)
    assert len(looped) == len(grouped) == 3 + 2 * 3
    for one, other in zip(looped, grouped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_bytes", [1, 3 * 16 * 24 * 4])
def test_experts_are_decoded_some_at_a_time(monkeypatch, num_bytes):
    bank = bank_of("int8")
    whole = run(grouped_experts, bank)
    monkeypatch.setattr(expert_grouped, "STACK_BYTES", num_bytes)
    for one, other in zip(whole, run(grouped_experts, bank), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_buffer_for_decoded_weights_is_bounded(monkeypatch):
    bank = bank_of("int8")
    experts_TK, _ = routed()
    monkeypatch.setattr(expert_grouped, "STACK_BYTES", 2 * 16 * 24 * 4)
    stacks = expert_grouped._Stacks(call_of(bank, experts_TK), inputs())
    assert [len(group.members) for group in stacks.groups] == [2, 2]
    assert stacks._buffer.nbytes == 2 * 16 * 24 * 4


class WeightShaped(TorchDispatchMode):
    """Counts the matrices of an expert's shape that products give."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default):
            stacked = result if result.dim() == 3 else result[None]
            self.count += len(stacked) * (tuple(stacked.shape[1:]) in ((16, 24), (24, 16)))
        return result


@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_of_a_frozen_weight_is_computed(way):
    bank = bank_of("int8")
    with WeightShaped() as products:
        run(way, bank)
    assert products.count == 2 * len(MATRICES)  # of experts 0 and 3: 4 has no tokens


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_every_time(way):
    bank = bank_of("int4")
    first, second = ([tensor.clone() for tensor in run(way, bank)] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_an_owned_expert_without_tokens_gets_no_gradient(way):
    bank = bank_of()
    run(way, bank)
    assert [bank.expert(j).gate.grad is None for j in OWNED] == [False, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_without_tokens_is_not_decoded(way, monkeypatch):
    bank, read = bank_of("int8", ()), []
    for method in ("dense", "decode_"):
        plain = getattr(FrozenExpert, method)
        monkeypatch.setattr(FrozenExpert, method, lambda self, *rest, f=plain: read.append(self) or f(self, *rest))
    run(way, bank)
    assert set(read) == {bank.expert(j) for j in range(4)}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_is_x_and_two_values_of_the_expert_width_per_slot(way):
    bank = bank_of("int8")
    experts_TK, weights_TK = routed()
    with saving() as saved:
        way(call_of(bank, experts_TK), inputs().requires_grad_(), weights_TK)
    weights = {weight.data_ptr() for weight in bank.parameters()}
    shapes = sorted(tuple(tensor.shape) for tensor in saved if tensor.data_ptr() not in weights)
    num_slots = NUM_TOKENS * 2
    assert shapes == [(NUM_TOKENS, 2), (NUM_TOKENS, 16), (num_slots, 24), (num_slots, 24)]


@pytest.mark.parametrize("way", WAYS)
def test_without_a_backward_pass_the_result_is_the_same(way):
    bank = bank_of("bf16")
    experts_TK, weights_TK = routed()
    kept, not_kept = (way(call_of(bank, experts_TK, keep=keep), inputs(), weights_TK) for keep in (True, False))
    assert torch.equal(kept, not_kept)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_computes_in_bf16_and_gives_fp32_gradients(way):
    bank = bank_of()
    exact, rounded = run(way, bank), run(way, bank, torch.bfloat16)
    assert {tensor.dtype for tensor in rounded} == {torch.float32}
    for one, other in zip(exact, rounded, strict=True):
        assert 0 < (one - other).norm() < 0.02 * one.norm()


def test_autocast_chooses_the_type_of_the_products():
    bank = bank_of("int8")
    experts_TK, weights_TK = routed()
    counts_M = torch.bincount(experts_TK.flatten(), minlength=MODEL.num_experts)
    routing = Routing(weights_TK, weights_TK, weights_TK, experts_TK, counts_M)
    x_TD, saved = inputs().requires_grad_(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.autocast("cpu", torch.bfloat16), hooks:
        y_TD = bank(x_TD, routing)
    y_TD.sum().backward()
    assert [tensor.dtype for tensor in saved if tensor.shape[-1] == 24 and tensor.shape[0] == 26] == [
        torch.bfloat16
    ] * 2
    assert y_TD.dtype == x_TD.grad.dtype == bank.expert(0).up.grad.dtype == torch.float32


def test_gradients_of_owned_weights_own_their_memory():
    bank = bank_of()
    for way in WAYS:
        run(way, bank)
        for expert in (bank.expert(0), bank.expert(3)):
            assert isinstance(expert, OwnedExpert)
            for weight in expert.parameters():
                assert weight.grad.is_contiguous()
                assert weight.grad.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("frozen_format", ["fp32", "bf16", "int8", "int4"])
def test_on_a_gpu_the_grouped_kernel_agrees_with_the_loop(frozen_format):
    bank = bank_of(frozen_format).to("cuda")
    x = inputs().to("cuda")
    assert expert_grouped.takes(x, torch.bfloat16, 16, 24)
    looped, grouped = (run(way, bank, torch.bfloat16, "cuda") for way in WAYS)
    for one, other in zip(looped, grouped, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_same_bits_every_time():
    bank = bank_of("int8").to("cuda")
    for way in WAYS:
        first, second = ([tensor.clone() for tensor in run(way, bank, torch.bfloat16, "cuda")] for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_grouped_kernel_is_for_bf16_on_gpus():
    assert not expert_grouped.takes(torch.zeros(1), torch.bfloat16, 16, 24)
