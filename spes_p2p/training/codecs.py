"""How updates travel: psi deltas as int8 blocks or fp32, expert shards as bf16 or fp32. Bit rules apply to this file.

Every peer decodes to the same bits: numpy only, one operation per statement, dtypes stated, nothing in place
(tests/unit/training/test_bit_rules.py). Names, dtypes and shapes come from the run's configuration, never from
a sender.

int8: blocks of 256 values, one fp32 scale each. scale = absmax / 127, q = rint(value / scale), half to even, and the
decoded value is float64(q) * float64(scale).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from spes_p2p.config import RunConfig
from spes_p2p.errors import SchemaError
from spes_p2p.model.shards import shard_shapes
from spes_p2p.training.arrays import F32, F64, I8, U16, Bytes, Tensors, require_finite
from spes_p2p.training.layout import BLOCK_VALUES, psi_layout
from spes_p2p.training.tensorfile import RAW_DTYPES, TensorSpec, decode_tensors, encode_tensors

PsiCodec: TypeAlias = Literal["int8", "fp32"]

Q_MAX = np.float64(127)
BF16_SHIFT = np.uint32(16)
BF16_HALF_BELOW = np.uint32(0x7FFF)
ONE_BIT = np.uint32(1)


def psi_piece_specs(codec: PsiCodec, num_values: int) -> tuple[TensorSpec, ...]:
    """Tensors of one psi piece of `num_values` values. The scales stand first, where 4-byte values are aligned."""
    if codec == "fp32":
        return (TensorSpec("values", "F32", (num_values,)),)
    num_blocks = -(-num_values // BLOCK_VALUES)
    return (TensorSpec("scale", "F32", (num_blocks,)), TensorSpec("q", "I8", (num_values,)))


def expert_blob_specs(config: RunConfig, shard: int) -> tuple[TensorSpec, ...]:
    """Tensors of the blob of one expert shard, by layer, expert, then gate, up, down."""
    dtype: Literal["BF16", "F32"] = "BF16" if config.codecs.expert == "bf16" else "F32"
    shapes = shard_shapes(config.model, config.experts_per_shard, shard)
    return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes.items())


def handover_specs(config: RunConfig, shard: int) -> tuple[TensorSpec, ...]:
    """Form of what a leaver hands over of a shard: masters, both moments and step counts, in fp32."""
    return tuple(
        TensorSpec(f"{kind}/{name}", "F32", (1,) if kind == "steps" else shape)
        for name, shape in shard_shapes(config.model, config.experts_per_shard, shard).items()
        for kind in ("master", "mean", "square", "steps")
    )


def quantise(values: F32) -> tuple[F32, I8]:
    """Scales [ceil(n / 256)] and q [n], in -127 to 127, of finite fp32 values [n]. A block of zeros has scale 0."""
    blocks = _blocks(values)
    magnitude = np.abs(blocks)
    absmax = np.max(magnitude, axis=1)
    wide_absmax = absmax.astype(np.float64)
    wide_scale = np.divide(wide_absmax, Q_MAX, dtype=np.float64)
    scale = wide_scale.astype(np.float32)
    rounded_scale = scale.astype(np.float64)
    # A scale can round to zero where the block's values are the smallest denormals: they become q = 0.
    divisor = np.where(scale == 0, Q_MAX, rounded_scale)
    wide = blocks.astype(np.float64)
    ratio = np.divide(wide, divisor[:, np.newaxis], dtype=np.float64)
    rounded = np.rint(ratio, dtype=np.float64)
    # A denormal scale is coarse, so that the ratio can pass 127.
    bounded = np.clip(rounded, -Q_MAX, Q_MAX)
    q: I8 = bounded.astype(np.int8).reshape(-1)[: values.size]
    return scale, q


def dequantise(scale: F32, q: I8) -> F64:
    """float64(q) * float64(scale of q's block): [n]."""
    wide_scale = scale.astype(np.float64)
    per_value = np.repeat(wide_scale, BLOCK_VALUES)[: q.size]
    wide_q = q.astype(np.float64)
    values: F64 = np.multiply(wide_q, per_value, dtype=np.float64)
    return values


def encode_psi_piece(codec: PsiCodec, delta: F32, residual: F32) -> tuple[bytes, F32]:
    """One part of psi's delta, with the error that earlier pieces left over.

    delta, residual: [n] fp32. Returns the piece's bytes and the new residual [n] fp32, delta + residual - decoded.
    Raises NotFiniteError if the sum is not finite.
    """
    wide_delta = delta.astype(np.float64)
    wide_residual = residual.astype(np.float64)
    wanted = np.add(wide_delta, wide_residual, dtype=np.float64)
    values = to_f32(wanted, "delta of psi")
    specs = psi_piece_specs(codec, values.size)
    arrays = (values,) if codec == "fp32" else quantise(values)
    data = encode_tensors(specs, arrays)
    decoded = decode_psi_piece(codec, values.size, data)
    error = np.subtract(wanted, decoded, dtype=np.float64)
    return data, error.astype(np.float32)


def decode_psi_piece(codec: PsiCodec, num_values: int, data: Bytes) -> F64:
    """Float64 values [num_values] of a psi piece.

    Raises SchemaError for another form, q = -128, a negative scale or a block of scale 0 with a q that is not 0, and
    NotFiniteError for a scale or value that is not finite.
    """
    tensors = decode_tensors(psi_piece_specs(codec, num_values), data)
    if codec == "fp32":
        require_finite(tensors["values"], "values")
        return tensors["values"].astype(np.float64)
    scale, q = tensors["scale"], tensors["q"]
    require_finite(scale, "scale")
    if np.signbit(scale).any():
        raise SchemaError("a scale is negative")
    if (q == np.int8(-128)).any():
        raise SchemaError("a q is -128")
    per_value = np.repeat(scale, BLOCK_VALUES)[: q.size]
    if q[per_value == 0].any():
        raise SchemaError("a block of scale 0 has a q that is not 0")
    return dequantise(scale, q)


def encode_expert_blob(config: RunConfig, shard: int, tensors: Mapping[str, F32]) -> bytes:
    """The blob of a shard, in the run's codec. Raises SchemaError or NotFiniteError if the tensors do not fit.

    A value that rounds to infinity in bf16 counts as not finite.
    """
    specs = expert_blob_specs(config, shard)
    if tensors.keys() != {spec.name for spec in specs}:
        raise SchemaError(f"the tensors are not those of shard {shard}")
    return encode_tensors(specs, (_expert_to_raw(spec, tensors[spec.name]) for spec in specs))


def open_expert_blob(config: RunConfig, shard: int, data: Bytes) -> dict[str, npt.NDArray[Any]]:
    """Read-only views of the blob's raw tensors, by name, for `expert_values`. Raises SchemaError for another form."""
    return decode_tensors(expert_blob_specs(config, shard), data)


def expert_values(raw: npt.NDArray[Any]) -> F32:
    """Fp32 values of one raw tensor of an expert blob: a new, writable array."""
    if raw.dtype == RAW_DTYPES["BF16"]:
        return bf16_to_f32(raw)
    return raw.astype(np.float32, copy=True)


def decode_expert_blob(config: RunConfig, shard: int, data: Bytes) -> Tensors:
    """Fp32 tensors of an expert blob, by name. Raises SchemaError for another form; does not look at the values."""
    return {name: expert_values(raw) for name, raw in open_expert_blob(config, shard, data).items()}


def f32_to_bf16(values: F32) -> U16:
    """Bits of bfloat16, rounded to nearest, ties to even. The values must be finite; large ones round to infinity."""
    bits = values.view(np.uint32)
    shifted = np.right_shift(bits, BF16_SHIFT, dtype=np.uint32)
    odd = np.bitwise_and(shifted, ONE_BIT, dtype=np.uint32)
    addend = np.add(odd, BF16_HALF_BELOW, dtype=np.uint32)
    carried = np.add(bits, addend, dtype=np.uint32)
    kept = np.right_shift(carried, BF16_SHIFT, dtype=np.uint32)
    return kept.astype(np.uint16)


def bf16_to_f32(bits: U16) -> F32:
    """Fp32 values of bfloat16 bits; exact."""
    wide = bits.astype(np.uint32)
    shifted = np.left_shift(wide, BF16_SHIFT, dtype=np.uint32)
    return shifted.view(np.float32)


def to_f32(values: F64, what: str) -> F32:
    """Round float64 values once to fp32. Raises NotFiniteError, naming `what`, if a result is not finite."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    require_finite(rounded, what)
    return rounded


def psi_piece_values(config: RunConfig, part: int, data: Bytes) -> F64:
    """Float64 values of one part of an update, in the run's codec. Raises as `decode_psi_piece` does."""
    return decode_psi_piece(config.codecs.psi, psi_layout(config).part_values(part), data)


def _blocks(values: F32) -> F32:
    """[n] -> [ceil(n / 256), 256], filled up with zeros."""
    num_missing = -values.size % BLOCK_VALUES
    return np.pad(values, (0, num_missing)).reshape(-1, BLOCK_VALUES)


def _expert_to_raw(spec: TensorSpec, values: F32) -> npt.NDArray[Any]:
    if values.dtype != np.float32:
        raise SchemaError(f"{spec.name}: {values.dtype} is not float32")
    contiguous = np.ascontiguousarray(values)
    require_finite(contiguous, spec.name)
    if spec.dtype == "F32":
        return contiguous
    bits = f32_to_bf16(contiguous)
    require_finite(bf16_to_f32(bits), spec.name)
    return bits
