"""Codecs of psi deltas and expert blobs."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_p2p.config import CodecConfig, ModelConfig, RunConfig
from spes_p2p.errors import NotFiniteError, SchemaError
from spes_p2p.model.init import initial_shard
from spes_p2p.training.codecs import (
    bf16_to_f32,
    decode_expert_blob,
    decode_psi_piece,
    dequantise,
    encode_expert_blob,
    encode_psi_piece,
    f32_to_bf16,
    psi_piece_specs,
    quantise,
)
from spes_p2p.training.tensorfile import encode_tensors

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=4, expert_width=6)
CONFIG = RunConfig(model=MODEL, experts_per_shard=2)
CONFIG_FP32 = RunConfig(model=MODEL, experts_per_shard=2, codecs=CodecConfig(expert="fp32", psi="fp32"))

finite_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
f32_arrays = hnp.arrays(np.float32, st.integers(1, 600), elements=finite_f32, fill=finite_f32)


def int8_piece(scale: list[float], q: list[int]) -> bytes:
    arrays = (np.array(scale, dtype=np.float32), np.array(q, dtype=np.int8))
    return encode_tensors(psi_piece_specs("int8", len(q)), arrays)


def test_int8_rounds_half_to_even() -> None:
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5], dtype=np.float32)
    scale, q = quantise(values)
    assert scale.tolist() == [1.0]
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, 64]


def test_every_block_has_its_own_scale() -> None:
    values = np.concatenate([np.full(256, 127), np.full(256, 254), [-508]]).astype(np.float32)
    scale, q = quantise(values)
    assert scale.tolist() == [1.0, 2.0, 4.0]
    assert q[[0, 255, 256, 511, 512]].tolist() == [127, 127, 127, 127, -127]


def test_a_block_of_zeros_has_scale_zero_and_decodes_to_zeros() -> None:
    data, left_over = encode_psi_piece("int8", np.zeros(300, np.float32), np.zeros(300, np.float32))
    assert decode_psi_piece("int8", 300, data).tolist() == [0.0] * 300
    assert left_over.tolist() == [0.0] * 300


def test_denormals_are_kept() -> None:
    smallest = np.float32(1e-45)
    values = np.full(256, smallest * 127, dtype=np.float32)
    scale, q = quantise(values)
    assert scale[0] == smallest
    assert dequantise(scale, q).tolist() == [127 * float(smallest)] * 256


def test_a_value_too_small_for_a_scale_stays_in_the_residual() -> None:
    delta = np.full(256, 1e-45, dtype=np.float32)
    data, left_over = encode_psi_piece("int8", delta, np.zeros(256, np.float32))
    assert not decode_psi_piece("int8", 256, data).any()
    assert left_over.tobytes() == delta.tobytes()


@settings(deadline=None)
@given(values=f32_arrays)
def test_int8_error_is_at_most_half_a_scale(values: np.ndarray) -> None:
    data, left_over = encode_psi_piece("int8", values, np.zeros_like(values))
    decoded = decode_psi_piece("int8", values.size, data)
    scale, _ = quantise(values)
    per_value = np.repeat(scale.astype(np.float64), 256)[: values.size]
    normal = per_value >= np.finfo(np.float32).smallest_normal
    error = np.abs(decoded - values.astype(np.float64))
    assert (error[normal] <= per_value[normal] * (0.5 + 1e-5)).all()
    np.testing.assert_array_equal(left_over, (values.astype(np.float64) - decoded).astype(np.float32))


def test_error_feedback_carries_what_was_rounded_away() -> None:
    generator = np.random.default_rng(3)
    residual = np.zeros(512, dtype=np.float32)
    wanted = np.zeros(512)
    received = np.zeros(512)
    for _ in range(30):
        delta = (generator.standard_normal(512) * 0.01).astype(np.float32)
        wanted += delta
        data, residual = encode_psi_piece("int8", delta, residual)
        received += decode_psi_piece("int8", 512, data)
    np.testing.assert_allclose(received + residual, wanted, atol=1e-7)
    assert np.abs(wanted - received).max() < 0.0005


def test_fp32_pieces_carry_the_sum_of_delta_and_residual() -> None:
    delta = np.array([1, -0.0, 1e-40], dtype=np.float32)
    data, left_over = encode_psi_piece("fp32", delta, np.array([2**-30, 0, 0], dtype=np.float32))
    assert decode_psi_piece("fp32", 3, data).tolist() == [1.0, 0.0, float(np.float32(1e-40))]
    assert left_over.tolist() == [2**-30, 0, 0]


@pytest.mark.parametrize("codec", ["int8", "fp32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_not_encoded(codec: str, bad: float) -> None:
    delta = np.zeros(5, dtype=np.float32)
    delta[3] = bad
    with pytest.raises(NotFiniteError):
        encode_psi_piece(codec, delta, np.zeros_like(delta))


def test_a_piece_has_one_form() -> None:
    assert decode_psi_piece("int8", 2, int8_piece([0.5], [2, -127])).tolist() == [1.0, -63.5]
    for scale, q in (([0.5], [2, -128]), ([-0.5], [2, 1]), ([-0.0], [0, 0]), ([0.0], [0, 1])):
        with pytest.raises(SchemaError):
            decode_psi_piece("int8", 2, int8_piece(scale, q))
    for bad in (np.nan, np.inf):
        with pytest.raises(NotFiniteError):
            decode_psi_piece("int8", 2, int8_piece([bad], [2, 1]))
    with pytest.raises(SchemaError):
        decode_psi_piece("int8", 3, int8_piece([0.5], [2, 1]))
    with pytest.raises(SchemaError):
        decode_psi_piece("fp32", 2, int8_piece([0.5], [2, 1]))
    with pytest.raises(NotFiniteError):
        decode_psi_piece("fp32", 1, encode_tensors(psi_piece_specs("fp32", 1), (np.array([np.nan], np.float32),)))


def nearest_bf16(value: np.float32) -> int:
    """The rule again, in exact arithmetic: the nearer of the two neighbours, or the even one."""
    bits = int(value.view(np.uint32))
    low, high = bits >> 16, (bits >> 16) + 1

    def exact(bf16: int) -> Fraction:
        return Fraction(float(np.array(bf16 << 16, np.uint32).view(np.float32)))

    below, above = abs(Fraction(float(value)) - exact(low)), abs(exact(high) - Fraction(float(value)))
    if below == above:
        return low if low % 2 == 0 else high
    return low if below < above else high


@settings(deadline=None)
@given(value=st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127))
def test_bf16_rounds_to_the_nearest_ties_to_even(value: float) -> None:
    single = np.float32(value)
    assert f32_to_bf16(np.array([single]))[0] == nearest_bf16(single)


def test_bf16_ties_go_to_even_and_denormals_stay() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x00008000, 0x00018000, 0x00010000, 0x80010000], np.uint32)
    rounded = f32_to_bf16(bits.view(np.float32))
    assert [hex(value) for value in rounded] == ["0x3f80", "0x3f82", "0x0", "0x2", "0x1", "0x8001"]


def test_every_finite_bf16_value_survives_a_round_trip() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = bf16_to_f32(every)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(f32_to_bf16(values[finite]), every[finite])


def test_expert_blobs_carry_the_values_of_their_codec() -> None:
    tensors = initial_shard(MODEL, 2, 0, 1)
    exact = decode_expert_blob(CONFIG_FP32, 1, encode_expert_blob(CONFIG_FP32, 1, tensors))
    rounded = decode_expert_blob(CONFIG, 1, encode_expert_blob(CONFIG, 1, tensors))
    assert exact.keys() == rounded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert exact[name].tobytes() == tensor.tobytes()
        np.testing.assert_allclose(rounded[name], tensor, rtol=2**-8)
        assert rounded[name].flags.writeable


def test_dictionary_order_changes_no_byte_of_a_blob() -> None:
    tensors = initial_shard(MODEL, 2, 0, 1)
    backwards = dict(reversed(tensors.items()))
    assert encode_expert_blob(CONFIG, 1, backwards) == encode_expert_blob(CONFIG, 1, tensors)


def test_a_blob_belongs_to_its_shard_and_codec() -> None:
    data = encode_expert_blob(CONFIG, 1, initial_shard(MODEL, 2, 0, 1))
    with pytest.raises(SchemaError):
        decode_expert_blob(CONFIG, 0, data)
    with pytest.raises(SchemaError):
        decode_expert_blob(CONFIG_FP32, 1, data)
    with pytest.raises(SchemaError):
        encode_expert_blob(CONFIG, 0, initial_shard(MODEL, 2, 0, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, np.finfo(np.float32).max])
def test_an_expert_that_would_not_be_finite_is_not_encoded(bad: float) -> None:
    tensors = initial_shard(MODEL, 2, 0, 0)
    tensors["layers.0.experts.0.up"][0, 0] = bad
    with pytest.raises(NotFiniteError, match=r"layers\.0\.experts\.0\.up"):
        encode_expert_blob(CONFIG, 0, tensors)
