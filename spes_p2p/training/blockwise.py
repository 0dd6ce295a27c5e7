"""AdamW's moments in 8 bits: blocks of 256 values with one fp32 scale each, and a code that is fine near zero.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), with powers instead of their
table, because powers of a whole chunk are quick on any device and need no gather:

    mean     value = scale * sign(q) * (|q| / 127)**4     q in -127..127
    square   value = scale * ((q + 129) / 256)**4         q in -128..127

The scale is the block's largest magnitude. A decade has about as many codes as in the paper's dynamic table, and the
range is longer. The square has no code for zero: a small second moment that was stored as zero would make the step
that divides by its root explode, while one that is stored too large only makes a step shorter.

A running mean changes by a few percent a step, less than the gap between two codes, so that rounding to the nearest
would hold it where it is. `dither` rounds up or down in turns instead: over the steps, the mean of the codes is that of
what should be stored. Fourth powers of them average a little higher: 1 % where a value is a millionth of its block's
largest, a fifth at a hundred-millionth (docs/LOG.md). It is a fixed sequence, so equal inputs give equal bits.

Encoding what was decoded gives the same values, bit for bit, unless the scale is so small (1e-28) that fp32 runs out.
Letters: n values in whole blocks, b = n / 256 blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK_VALUES = 256
MEAN_MAX = 127
SQUARE_CODES = 256
SQUARE_LOWEST = -128
NEAREST = 0.5
"""Rounding offset: the nearest code."""
GOLDEN = (math.sqrt(5) - 1) / 2
DITHER_STEPS = 4096
"""Steps until the sequence of `dither` begins again."""


def num_blocks(num_values: int) -> int:
    """Blocks for so many values."""
    return -(-num_values // BLOCK_VALUES)


def dither_sequence(device: torch.device) -> Tensor:
    """What `dither` cuts from: fp32 [DITHER_STEPS + 256] in [0, 1)."""
    places = torch.arange(DITHER_STEPS + BLOCK_VALUES, dtype=torch.float64)
    # Rounding to fp32 must not reach 1: the largest value of a block would leave the range of codes.
    return torch.remainder(places * GOLDEN, 1.0).float().clamp(max=1 - 2**-12).to(device)


def dither(sequence: Tensor, step: int) -> Tensor:
    """Rounding offsets [256] of the values of a block in this step. Over the steps each value sees multiples of the
    golden ratio modulo 1, which fill the interval most evenly; neighbours see them shifted."""
    at = step % DITHER_STEPS
    return sequence[at : at + BLOCK_VALUES]


def decode_mean(codes_n: Tensor, scales_b: Tensor, out_n: Tensor, work_n: Tensor) -> None:
    """Write the values of a mean to `out_n`; `work_n` is overwritten."""
    out_n.copy_(codes_n)
    out_n.mul_(1 / MEAN_MAX)
    torch.abs(out_n, out=work_n)
    out_n.mul_(work_n)
    work_n.mul_(work_n)
    out_n.mul_(work_n)
    _blocks(out_n).mul_(scales_b[:, None])


def encode_mean(values_n: Tensor, codes_n: Tensor, scales_b: Tensor, offset: Tensor | float, work_n: Tensor) -> None:
    """Write codes and scales of finite values; `work_n` is overwritten. `offset`: NEAREST or a `dither`."""
    torch.abs(values_n, out=work_n)
    torch.amax(_blocks(work_n), 1, out=scales_b)
    _blocks(work_n).div_(_divisors(scales_b)[:, None])
    work_n.sqrt_().sqrt_().mul_(MEAN_MAX)
    _blocks(work_n).add_(offset)
    work_n.floor_()
    torch.copysign(work_n, values_n, out=work_n)
    codes_n.copy_(work_n)


def decode_square(codes_n: Tensor, scales_b: Tensor, out_n: Tensor) -> None:
    """Write the values of a second moment to `out_n`."""
    out_n.copy_(codes_n)
    out_n.add_(1 - SQUARE_LOWEST).mul_(1 / SQUARE_CODES)
    out_n.mul_(out_n)
    out_n.mul_(out_n)
    _blocks(out_n).mul_(scales_b[:, None])


def encode_square(values_n: Tensor, codes_n: Tensor, scales_b: Tensor, offset: Tensor | float, work_n: Tensor) -> None:
    """Write codes and scales of finite values >= 0; `work_n` is overwritten. `offset`: NEAREST or a `dither`."""
    torch.amax(_blocks(values_n), 1, out=scales_b)
    torch.div(_blocks(values_n), _divisors(scales_b)[:, None], out=_blocks(work_n))
    work_n.sqrt_().sqrt_().mul_(SQUARE_CODES).add_(SQUARE_LOWEST - 1)
    _blocks(work_n).add_(offset)
    # int8 at once is quicker than uint8 by a fifth of the whole step
    work_n.floor_().clamp_(min=SQUARE_LOWEST)
    codes_n.copy_(work_n)


def _blocks(values_n: Tensor) -> Tensor:
    return values_n.view(-1, BLOCK_VALUES)


def _divisors(scales_b: Tensor) -> Tensor:
    return torch.where(scales_b == 0, 1.0, scales_b)
