import pytest
import torch
import torch.nn.functional as F

from spes_p2p.model.head import CHUNK_BYTES, default_chunk_tokens, head_losses, token_nats
from spes_p2p.testing.saved import saved_bytes

T, D, V = 10, 6, 17
Z = 0.3


def case(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(T, D, generator=generator, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    return hidden_TD, weight_VD, torch.randint(0, V, (T,), generator=generator)


def plain(hidden_TD, weight_VD, targets_T) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TV = hidden_TD @ weight_VD.T
    return F.cross_entropy(logits_TV, targets_T), logits_TV.logsumexp(-1).square().mean()


def gradients(loss, *inputs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_values_and_gradients_are_the_plain_ones_whatever_the_chunk(chunk):
    hidden_TD, weight_VD, targets_T = case()
    cross_entropy, z = plain(hidden_TD, weight_VD, targets_T)
    expected = cross_entropy + Z * z
    got = head_losses(hidden_TD, weight_VD, targets_T, Z, chunk_tokens=chunk)
    torch.testing.assert_close(got.cross_entropy, cross_entropy.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.z, z.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.total, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        gradients(got.total, hidden_TD, weight_VD), gradients(expected, hidden_TD, weight_VD), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [4, 10])
def test_gradients_are_those_of_finite_differences(chunk):
    hidden_TD, weight_VD, targets_T = case(torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden, weight: 3 * head_losses(hidden, weight, targets_T, Z, chunk_tokens=chunk).total,
        (hidden_TD, weight_VD),
    )


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_large_logits_neither_overflow_nor_vanish(offset):
    hidden_TD, weight_VD, targets_T = case()
    with torch.no_grad():
        hidden_TD[:, 0], weight_VD[:, 0] = offset, 1.0
    cross_entropy, z = plain(hidden_TD, weight_VD, targets_T)
    got = head_losses(hidden_TD, weight_VD, targets_T, Z, chunk_tokens=4)
    torch.testing.assert_close(got.total, cross_entropy + Z * z, rtol=1e-5, atol=1e-5)


def test_parts_of_a_batch_add_up_to_the_batch_and_into_one_gradient():
    hidden_TD, weight_VD, targets_T = case()
    whole = head_losses(hidden_TD, weight_VD, targets_T, Z)
    expected_hidden, expected_weight = gradients(whole.total, hidden_TD, weight_VD)
    head_losses(hidden_TD[:3], weight_VD, targets_T[:3], Z, batch_tokens=T).total.backward()
    buffer = weight_VD.grad
    second = head_losses(hidden_TD[3:], weight_VD, targets_T[3:], Z, batch_tokens=T, weight_grad_VD=buffer)
    second.total.backward()
    assert weight_VD.grad is buffer
    torch.testing.assert_close(weight_VD.grad, expected_weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden_TD.grad, expected_hidden, rtol=1e-5, atol=1e-6)


def test_only_the_two_gradients_are_kept():
    hidden_TD, weight_VD, targets_T = case()
    kept = saved_bytes(lambda: head_losses(hidden_TD, weight_VD, targets_T, Z), (hidden_TD, weight_VD))
    assert kept == 4 * (T * D + V * D)


def test_a_frozen_head_gets_no_gradient():
    hidden_TD, weight_VD, targets_T = case()
    kept = saved_bytes(lambda: head_losses(hidden_TD, weight_VD.detach(), targets_T, Z), (hidden_TD, weight_VD))
    assert kept == 4 * T * D


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_nats_of_each_token_are_the_plain_ones(chunk):
    hidden_TD, weight_VD, targets_T = case()
    expected = F.cross_entropy(hidden_TD @ weight_VD.T, targets_T, reduction="none")
    got = token_nats(hidden_TD, weight_VD, targets_T, chunk)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-6)
    assert not got.requires_grad


def test_under_autocast_products_are_bf16_and_losses_fp32():
    hidden_TD, weight_VD, targets_T = case()
    cross_entropy, z = plain(hidden_TD.bfloat16().float(), weight_VD.bfloat16().float(), targets_T)
    with torch.autocast("cpu", torch.bfloat16):
        got = head_losses(hidden_TD, weight_VD, targets_T, Z, chunk_tokens=4)
        nats_T = token_nats(hidden_TD, weight_VD, targets_T, 4)
    assert got.total.dtype == nats_T.dtype == torch.float32
    torch.testing.assert_close(got.total, cross_entropy + Z * z, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(nats_T.mean(), got.cross_entropy, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        gradients(got.total, hidden_TD, weight_VD), gradients(cross_entropy + Z * z, hidden_TD, weight_VD), strict=True
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))


def test_chunks_fill_the_byte_budget_and_hold_one_token_at_least():
    assert default_chunk_tokens(torch.empty(32768, 1)) == CHUNK_BYTES["cpu"] // (4 * 32768) == 256
    assert default_chunk_tokens(torch.empty(CHUNK_BYTES["cpu"], 1, device="meta")) == 1
