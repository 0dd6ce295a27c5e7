"""How the experts of others are kept in memory: fp32, bf16, or absmax quantised to 8 or 4 bits.

A matrix [R, C] in a quantised format is integers q and one scale per block of a row; the value is q * scale.

    int8   a block is a row;                q in -127..127, scale fp32 = absmax / 127
    int4   a block is 64 values of a row    q in -7..7,     scale fp16 = absmax / 7, two values in a byte
           (the row, if 64 does not divide its length)

q = round(value / scale), half to even, by the scale as it is stored; a block of zeros has scale 0. Values beyond what
the scale can say (not finite, or beyond 65504 * 7 in int4) make their block NaN, so that they are noticed. Every
operation is elementwise or a maximum: the same bits with any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spes_p2p.config import FrozenFormat

INT4_BLOCK = 64
_INT8_MAX, _INT4_MAX = 127, 7


class FrozenMatrix(nn.Module):
    """A constant matrix [R, C] in a storage format. Its buffers are zero values when made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_rows, self.num_columns = shape

    @property
    def shape(self) -> torch.Size:
        """[R, C]."""
        return torch.Size((self.num_rows, self.num_columns))

    def store_(self, values_RC: Tensor) -> None:
        """Take these values, as far as the format can hold them."""
        raise NotImplementedError

    def decode_(self, out_RC: Tensor) -> Tensor:
        """Write the values into a contiguous floating-point matrix, computed in fp32 or wider. Returns it."""
        raise NotImplementedError

    def dense(self, scratch: Tensor) -> Tensor:
        """The values [R, C] in the type of `scratch`, which has room for R * C of them: written there, or the stored
        matrix itself where it is of that type. To be read at once and not kept."""
        return self.decode_(scratch[: self.num_rows * self.num_columns].view(self.shape))

    def decoded(self) -> Tensor:
        """A new fp32 matrix of the values."""
        return self.decode_(torch.empty(self.shape, dtype=torch.float32, device=next(self.buffers()).device))


class _PlainMatrix(FrozenMatrix):
    """In a floating-point type."""

    values: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.register_buffer("values", torch.zeros(shape, dtype=dtype))

    def store_(self, values_RC: Tensor) -> None:
        self.values.copy_(values_RC)

    def decode_(self, out_RC: Tensor) -> Tensor:
        return out_RC.copy_(self.values)

    def dense(self, scratch: Tensor) -> Tensor:
        return self.values if self.values.dtype == scratch.dtype else super().dense(scratch)


class _Int8Matrix(FrozenMatrix):
    """Eight bits a value, one fp32 scale per row."""

    values: Tensor
    scales: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.register_buffer("values", torch.zeros(shape, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(self.num_rows, 1))

    def store_(self, values_RC: Tensor) -> None:
        integers, scales = _quantised(values_RC.to(self.scales), _INT8_MAX, torch.float32)
        self.values.copy_(integers)
        self.scales.copy_(scales)

    def decode_(self, out_RC: Tensor) -> Tensor:
        return _scaled_(out_RC.copy_(self.values), self.scales)


class _Int4Matrix(FrozenMatrix):
    """Four bits a value, one fp16 scale per block. The first half of all values lies in the low nibbles, the second
    half in the high ones, so that each half is unpacked as a whole."""

    values: Tensor
    scales: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        block = _int4_block(self.num_columns)
        num_values = self.num_rows * self.num_columns
        self.register_buffer("values", torch.zeros((num_values + 1) // 2, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(num_values // block, 1, dtype=torch.float16))

    def store_(self, values_RC: Tensor) -> None:
        blocks = values_RC.to(device=self.scales.device, dtype=torch.float32).reshape(len(self.scales), -1)
        integers, scales = _quantised(blocks, _INT4_MAX, torch.float16)
        self.scales.copy_(scales)
        flat = integers.to(torch.int8).flatten()
        half = len(self.values)
        self.values.copy_(flat[:half] & 15)
        self.values[: len(flat) - half] |= flat[half:] << 4

    def decode_(self, out_RC: Tensor) -> Tensor:
        flat, half = out_RC.view(-1), len(self.values)
        # shifts of signed bytes keep the sign
        high = self.values >> 4
        flat[half:].copy_(high[: len(flat) - half])
        flat[:half].copy_(torch.bitwise_left_shift(self.values, 4, out=high).bitwise_right_shift_(4))
        _scaled_(flat.view(len(self.scales), -1), self.scales)
        return out_RC


def frozen_matrix(frozen_format: FrozenFormat, shape: tuple[int, ...]) -> FrozenMatrix:
    """A matrix of zeros in this format."""
    match frozen_format:
        case "fp32":
            return _PlainMatrix(shape, torch.float32)
        case "bf16":
            return _PlainMatrix(shape, torch.bfloat16)
        case "int8":
            return _Int8Matrix(shape)
        case "int4":
            return _Int4Matrix(shape)


def frozen_bytes(frozen_format: FrozenFormat, shape: tuple[int, ...]) -> int:
    """Bytes that a matrix [R, C] takes in this format, scales among them."""
    rows, columns = shape
    match frozen_format:
        case "fp32":
            return 4 * rows * columns
        case "bf16":
            return 2 * rows * columns
        case "int8":
            return rows * columns + 4 * rows
        case "int4":
            return (rows * columns + 1) // 2 + 2 * (rows * columns // _int4_block(columns))


def _int4_block(num_columns: int) -> int:
    return INT4_BLOCK if num_columns % INT4_BLOCK == 0 else num_columns


def _quantised(blocks: Tensor, largest: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(integers as floating-point numbers, scales [blocks, 1]) of fp32 blocks [blocks, values]."""
    scales = (blocks.abs().amax(dim=1, keepdim=True) / largest).to(scale_dtype)
    # Zero blocks, and scales that underflowed: 0 / 0 and x / 0 become zeros. NaN comes back by its scale.
    ratios = torch.where(scales > 0, blocks / scales.float(), 0.0)
    return ratios.round_().clamp_(-largest, largest), scales


def _scaled_(integers: Tensor, scales: Tensor) -> Tensor:
    """Multiply in place, rounding once. Integers of eight bits are exact in every type that is wide enough for them."""
    return integers.mul_(scales)
