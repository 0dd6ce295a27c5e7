"""Causal self-attention with rotary positions, grouped key heads and query-key norm.

B batch, T sequence, D width, N query heads, G key heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.config import ModelConfig
from spes_p2p.model.products import Linear

ROWS_VALUES = 1 << 16
"""Values of the rows that a norm goes over at a time: 256 KiB in fp32."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], in the type of `x`."""
        if x.is_cuda:  # PyTorch's kernel for GPUs saves as little as ours and is one pass
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]  # untyped in torch
        return y


class _RMSNorm(torch.autograd.Function):
    """Saves its input and one number per row, where PyTorch's composed form for the CPU also saves the quotient. Goes
    over some rows at a time, which stay in the processor's cache from one operation to the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_RD = x.reshape(-1, x.shape[-1])
        y_RD = torch.empty_like(x_RD)
        inverse_R1 = x_RD.new_empty(len(x_RD), 1, dtype=weight_D.dtype)
        for rows in _some_rows(x_RD):
            wide, inverse = x_RD[rows].to(weight_D.dtype), inverse_R1[rows]
            torch.mean(wide.square(), dim=-1, keepdim=True, out=inverse)
            inverse.add_(eps).rsqrt_()
            y_RD[rows] = (wide * inverse).mul_(weight_D)
        ctx.save_for_backward(x, weight_D, inverse_R1)
        return y_RD.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse_R1 = ctx.saved_tensors
        x_RD, grad_RD = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, grads[0]))
        grad_x_RD, grad_weight_D = torch.empty_like(x_RD), torch.zeros_like(weight_D)
        for rows in _some_rows(x_RD):
            grad, inverse = grad_RD[rows].to(weight_D.dtype), inverse_R1[rows]
            unit = x_RD[rows].to(weight_D.dtype) * inverse  # y = unit * weight
            grad_weight_D += (grad * unit).sum(dim=0)
            grad_unit = grad * weight_D
            # d unit / d x = (1 - unit unit^T / D) / rms
            along = (grad_unit * unit).mean(dim=-1, keepdim=True)
            grad_x_RD[rows] = grad_unit.sub_(unit.mul_(along)).mul_(inverse)
        return grad_x_RD.view_as(x), grad_weight_D, None


def _some_rows(x_RD: Tensor) -> list[slice]:
    step = max(1, ROWS_VALUES // x_RD.shape[1])
    return [slice(first, first + step) for first in range(0, len(x_RD), step)]


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos_TH, sin_TH) of rotary positions 0 to length - 1, in the rotate-half layout: both halves alike."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Apply rotary positions: x * cos + rotate_half(x) * sin (Su et al., arXiv 2104.09864), in the tables' type.
    Returns the type of `x`."""
    if x_BNTH.is_cuda or torch.compiler.is_compiling() or x_BNTH.dtype != cos_TH.dtype:
        first, second = x_BNTH.chunk(2, dim=-1)
        return (x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH).to(x_BNTH.dtype)
    y: Tensor = _Rotate.apply(x_BNTH, cos_TH, sin_TH)  # type: ignore[no-untyped-call]  # untyped in torch
    return y


class _Rotate(torch.autograd.Function):
    """The same without intermediate results, for CPUs: what is new memory costs more there than what is computed."""

    @staticmethod
    def forward(ctx: Any, x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TH, sin_TH)
        return _rotated(x_BNTH, cos_TH, sin_TH, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_TH, sin_TH = ctx.saved_tensors
        return _rotated(grads[0], cos_TH, sin_TH, -1), None, None  # the angles are those of a rotation back


def _rotated(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor, sign: int) -> Tensor:
    first, second = x_BNTH.chunk(2, dim=-1)
    sin_first, sin_second = sin_TH.chunk(2, dim=-1)
    y_BNTH = torch.empty_like(x_BNTH)
    y_first, y_second = torch.mul(x_BNTH, cos_TH, out=y_BNTH).chunk(2, dim=-1)
    y_first.addcmul_(second, sin_first, value=-sign)
    y_second.addcmul_(first, sin_second, value=sign)
    return y_BNTH


class Attention(nn.Module):
    """One attention layer, no biases. The query-key norm is per head (Qwen3) or over the full width (OLMoE)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.resolved_head_dim
        self.norm_per_head = config.qk_norm == "head"
        q_width, k_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = Linear(config.width, q_width)
        self.k = Linear(config.width, k_width)
        self.v = Linear(config.width, k_width)
        self.o = Linear(q_width, config.width)
        self.q_norm = RMSNorm(self.head_dim if self.norm_per_head else q_width, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim if self.norm_per_head else k_width, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; position t sees positions 0 to t of its own sequence."""
        batch, length, _ = x_BTD.shape
        q_BNTH = rotate(self._heads(self.q(x_BTD), self.q_norm, self.num_heads), cos_TH, sin_TH)
        k_BGTH = rotate(self._heads(self.k(x_BTD), self.k_norm, self.num_kv_heads), cos_TH, sin_TH)
        v_BGTH = self.v(x_BTD).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        y_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=self.num_kv_heads != self.num_heads
        )
        out: Tensor = self.o(y_BNTH.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _heads(self, x_BTW: Tensor, norm: RMSNorm, num_heads: int) -> Tensor:
        """Split into heads [B, N, T, H] and apply the norm, before or after the split."""
        batch, length, _ = x_BTW.shape
        if not self.norm_per_head:
            x_BTW = norm(x_BTW)
        x_BTNH = x_BTW.view(batch, length, num_heads, self.head_dim)
        if self.norm_per_head:
            x_BTNH = norm(x_BTNH)
        return x_BTNH.transpose(1, 2)
