"""AdamW's moments of one weight in the forms they have: as they travel, as fp32 tensors, and in 8 bits.

In 8 bits they take 2.03 bytes for each value of a weight instead of 8. Packing and unpacking go by chunks, so that
nothing of a weight's size in fp32 is made besides the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spes_p2p.config import MomentsFormat
from spes_p2p.training.blockwise import (
    BLOCK_VALUES,
    NEAREST,
    decode_mean,
    decode_square,
    dither_sequence,
    encode_mean,
    encode_square,
    num_blocks,
)

SMALLEST_PACKED = 4096
"""Weights with fewer values keep fp32 moments: those of norms, which are sensitive and cost nothing."""
CPU_CHUNK_VALUES = 1 << 16
"""256 KiB in fp32: the buffers of a chunk stay in a core's cache."""
GPU_CHUNK_VALUES = 1 << 22
"""16 MiB in fp32: enough to hide the start of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What AdamW remembers of one weight: running means of gradient and squared gradient, and how many steps."""

    mean: npt.NDArray[np.float32]
    square: npt.NDArray[np.float32]
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMoments:
    """fp32 tensors of the weight's shape."""

    mean: Tensor
    square: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in checkpoints."""
        return {"mean": self.mean, "square": self.square}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMoments:
    """8 bits a value, filled up to whole blocks: int8 codes [n] and fp32 scales [n / 256]."""

    mean: Tensor
    mean_scales: Tensor
    square: Tensor
    square_scales: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in checkpoints."""
        return {
            "mean": self.mean,
            "mean_scales": self.mean_scales,
            "square": self.square,
            "square_scales": self.square_scales,
        }


AnyMoments: TypeAlias = PlainMoments | PackedMoments


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMoments:
    """Moments in the form in which an optimizer holds them, with the steps behind them."""

    moments: AnyMoments
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Working memory of one device: fp32 [chunk] each."""

    zeros: Tensor
    mean: Tensor
    square: Tensor
    work: Tensor
    dither: Tensor
    """What `blockwise.dither` cuts from."""

    @classmethod
    def on(cls, device: torch.device) -> Buffers:
        """Buffers of the size that suits the device."""
        size = CPU_CHUNK_VALUES if device.type == "cpu" else GPU_CHUNK_VALUES
        zeros, mean, square, work = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4))
        return cls(zeros=zeros, mean=mean, square=square, work=work, dither=dither_sequence(device))

    @property
    def num_values(self) -> int:
        """Values of a chunk."""
        return self.zeros.numel()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a weight's values, flat."""

    values: slice
    padded: slice
    """The same in whole blocks."""
    blocks: slice

    @property
    def num_values(self) -> int:
        """Values without the filling."""
        return int(self.values.stop - self.values.start)


def is_packed(num_values: int, moments: MomentsFormat) -> bool:
    """Whether a weight of so many values has its moments in 8 bits."""
    return moments == "int8" and num_values >= SMALLEST_PACKED


def moments_bytes(num_values: int, moments: MomentsFormat) -> int:
    """Bytes of both moments of a weight of so many values."""
    return 2 * num_blocks(num_values) * (BLOCK_VALUES + 4) if is_packed(num_values, moments) else 8 * num_values


def chunks(num_values: int, chunk_values: int) -> Iterator[Chunk]:
    """Cut a weight's values into chunks; `chunk_values` is a multiple of a block."""
    for start in range(0, num_values, chunk_values):
        stop = min(start + chunk_values, num_values)
        blocks = slice(start // BLOCK_VALUES, num_blocks(stop))
        yield Chunk(slice(start, stop), slice(start, blocks.stop * BLOCK_VALUES), blocks)


def zero_moments(weight: Tensor, moments: MomentsFormat) -> AnyMoments:
    """Moments of a weight before its first step."""
    if not is_packed(weight.numel(), moments):
        return PlainMoments(mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
    # With a scale of zero, every code is zero.
    blocks, device = num_blocks(weight.numel()), weight.device
    codes = (torch.zeros(blocks * BLOCK_VALUES, dtype=torch.int8, device=device) for _ in range(2))
    scales = (torch.zeros(blocks, dtype=torch.float32, device=device) for _ in range(2))
    return PackedMoments(mean=next(codes), mean_scales=next(scales), square=next(codes), square_scales=next(scales))


def load_chunk(packed: PackedMoments, chunk: Chunk, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Mean and square of a chunk, filling included, in the buffers."""
    size = chunk.padded.stop - chunk.padded.start
    mean_n, square_n, work_n = buffers.mean[:size], buffers.square[:size], buffers.work[:size]
    decode_mean(packed.mean[chunk.padded], packed.mean_scales[chunk.blocks], mean_n, work_n)
    decode_square(packed.square[chunk.padded], packed.square_scales[chunk.blocks], square_n)
    return mean_n, square_n


def store_chunk(packed: PackedMoments, chunk: Chunk, buffers: Buffers, offset: Tensor | float) -> None:
    """Put the chunk in the buffers back, rounded by `offset` (see `blockwise`)."""
    size = chunk.padded.stop - chunk.padded.start
    mean_n, square_n, work_n = buffers.mean[:size], buffers.square[:size], buffers.work[:size]
    encode_mean(mean_n, packed.mean[chunk.padded], packed.mean_scales[chunk.blocks], offset, work_n)
    encode_square(square_n, packed.square[chunk.padded], packed.square_scales[chunk.blocks], offset, work_n)


def unpack(packed: PackedMoments, weight: Tensor, buffers: Buffers) -> PlainMoments:
    """fp32 moments of a weight, of its shape and on its device."""
    plain = PlainMoments(mean=torch.empty_like(weight), square=torch.empty_like(weight))
    for chunk in chunks(weight.numel(), buffers.num_values):
        mean_n, square_n = load_chunk(packed, chunk, buffers)
        plain.mean.view(-1)[chunk.values] = mean_n[: chunk.num_values]
        plain.square.view(-1)[chunk.values] = square_n[: chunk.num_values]
    return plain


def pack(plain: PlainMoments, weight: Tensor, buffers: Buffers) -> PackedMoments:
    """The nearest 8-bit moments, on the weight's device. What was unpacked before becomes the same bits again."""
    packed = zero_moments(weight, "int8")
    if not isinstance(packed, PackedMoments):
        raise ValueError(f"{weight.numel()} values are not packed")
    mean, square = plain.mean.reshape(-1), plain.square.reshape(-1)
    for chunk in chunks(weight.numel(), buffers.num_values):
        for buffer, moment in ((buffers.mean, mean), (buffers.square, square)):
            buffer[: chunk.num_values] = moment[chunk.values]
            buffer[chunk.num_values : chunk.padded.stop - chunk.padded.start] = 0.0
        store_chunk(packed, chunk, buffers, NEAREST)
    return packed
