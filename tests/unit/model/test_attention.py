import math

import pytest
import torch

from spes_p2p.model.attention import Attention, RMSNorm, rotary_table, rotate
from spes_p2p.testing.training import TINY_MODEL


def attention(**changes) -> Attention:
    torch.manual_seed(0)
    return Attention(TINY_MODEL.model_copy(update=changes))


def run(layer: Attention, x_BTD: torch.Tensor) -> torch.Tensor:
    return layer(x_BTD, *rotary_table(x_BTD.shape[1], layer.head_dim, 1e4, torch.device("cpu")))


def reference(layer: Attention, x_TD: torch.Tensor) -> torch.Tensor:
    """One sequence, one head at a time, in float64, from the formulas."""
    layer = layer.double()
    length, head_dim = x_TD.shape[0], layer.head_dim
    x_TD = x_TD.double()

    def rms(v, weight):
        return v / torch.sqrt((v * v).mean(-1, keepdim=True) + layer.q_norm.eps) * weight

    q, k, v = x_TD @ layer.q.weight.T, x_TD @ layer.k.weight.T, x_TD @ layer.v.weight.T
    if not layer.norm_per_head:
        q, k = rms(q, layer.q_norm.weight), rms(k, layer.k_norm.weight)
    outputs = []
    for head in range(layer.num_heads):
        group = head // (layer.num_heads // layer.num_kv_heads)
        q_TH = q[:, head * head_dim : (head + 1) * head_dim]
        k_TH = k[:, group * head_dim : (group + 1) * head_dim]
        v_TH = v[:, group * head_dim : (group + 1) * head_dim]
        if layer.norm_per_head:
            q_TH, k_TH = rms(q_TH, layer.q_norm.weight), rms(k_TH, layer.k_norm.weight)
        rotated = []
        for x_TH in (q_TH, k_TH):
            y_TH = torch.empty_like(x_TH)
            half = head_dim // 2
            for t in range(length):
                for i in range(half):
                    angle = t * 1e4 ** (-2 * i / head_dim)
                    y_TH[t, i] = x_TH[t, i] * math.cos(angle) - x_TH[t, i + half] * math.sin(angle)
                    y_TH[t, i + half] = x_TH[t, i + half] * math.cos(angle) + x_TH[t, i] * math.sin(angle)
            rotated.append(y_TH)
        scores = rotated[0] @ rotated[1].T / math.sqrt(head_dim)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v_TH)
    return torch.cat(outputs, dim=-1) @ layer.o.weight.T


@pytest.mark.parametrize("qk_norm", ["head", "full"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_equals_the_formulas(qk_norm, num_kv_heads):
    layer = attention(qk_norm=qk_norm, num_kv_heads=num_kv_heads)
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.uniform_(0.5, 1.5)
        x_BTD = torch.randn(2, 7, 16)
        got = run(layer, x_BTD)
        for sequence in range(2):
            torch.testing.assert_close(got[sequence].double(), reference(layer, x_BTD[sequence]), rtol=1e-5, atol=1e-5)


def test_a_position_sees_nothing_after_it():
    layer = attention()
    x_BTD = torch.randn(1, 9, 16)
    changed = x_BTD.clone()
    changed[:, 5:] += 1
    with torch.no_grad():
        before, after = run(layer, x_BTD), run(layer, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


def test_rotation_depends_on_the_distance_alone():
    cos_TH, sin_TH = rotary_table(40, 8, 1e4, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)

    def at(x, t):
        return rotate(x[None, None, None, :], cos_TH[t : t + 1], sin_TH[t : t + 1]).flatten()

    torch.testing.assert_close(at(q, 5) @ at(k, 2), at(q, 33) @ at(k, 30), rtol=1e-4, atol=1e-5)


def test_rms_norm_of_bf16_is_computed_in_fp32():
    norm = RMSNorm(4, 1e-6)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = (x / math.sqrt(7.5)).bfloat16()
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x.bfloat16()), expected, rtol=0, atol=0)
