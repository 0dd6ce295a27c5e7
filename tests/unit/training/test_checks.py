"""What is refused of a piece, and why."""

import numpy as np
import pytest

from spes_p2p.config import CodecConfig, ModelConfig, ProtocolConfig, RunConfig
from spes_p2p.model.init import initial_shard
from spes_p2p.protocol.wire import RefusalReason
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.checks import PieceRefusal, check_expert_blob, check_psi_piece
from spes_p2p.training.codecs import (
    decode_expert_blob,
    encode_expert_blob,
    encode_psi_piece,
    expert_blob_specs,
    psi_piece_specs,
    psi_piece_values,
)
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.norms import expert_squared_norm, norms_agree, squared_norm
from spes_p2p.training.tensorfile import encode_tensors

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=4, expert_width=6, vocab_size=32)
CONFIG = RunConfig(model=MODEL, experts_per_shard=2, protocol=ProtocolConfig(parts=3))
NUM_VALUES = psi_layout(CONFIG).part_values(1)


def psi_piece() -> tuple[bytes, float]:
    delta = np.random.default_rng(2).standard_normal(NUM_VALUES).astype(np.float32)
    data, _ = encode_psi_piece("int8", delta, np.zeros_like(delta))
    return data, squared_norm(psi_piece_values(CONFIG, 1, data))


def base() -> Tensors:
    return initial_shard(MODEL, 2, 0, 1)


def expert_piece() -> tuple[bytes, float]:
    trained = initial_shard(MODEL, 2, 5, 1)
    data = encode_expert_blob(CONFIG, 1, trained)
    return data, expert_squared_norm(CONFIG, 1, data, base().__getitem__)


def test_an_honest_piece_is_not_refused() -> None:
    data, norm = psi_piece()
    assert check_psi_piece(CONFIG, 1, data, norm) is None
    assert check_psi_piece(CONFIG, 1, data, norm, max_squared_norm=norm) is None
    data, norm = expert_piece()
    assert check_expert_blob(CONFIG, 1, data, base().__getitem__, norm) is None
    assert check_expert_blob(CONFIG, 1, data, base().__getitem__, norm, max_squared_norm=norm) is None


def test_the_norm_of_a_psi_piece_is_that_of_its_decoded_values() -> None:
    data, norm = psi_piece()
    assert norm == pytest.approx(sum(float(value) ** 2 for value in psi_piece_values(CONFIG, 1, data)), rel=1e-12)


def test_the_norm_of_an_expert_blob_is_that_of_its_distance_from_the_base_row() -> None:
    data, norm = expert_piece()
    decoded = decode_expert_blob(CONFIG, 1, data)
    wanted = sum(
        float(np.square(decoded[name].astype(np.float64) - tensor.astype(np.float64)).sum())
        for name, tensor in base().items()
    )
    assert norm == pytest.approx(wanted, rel=1e-12)


def test_another_norm_than_stated_is_refused() -> None:
    data, norm = psi_piece()
    assert check_psi_piece(CONFIG, 1, data, norm * (1 + 1e-7)) is None
    for stated in (norm * (1 + 1e-5), norm * (1 - 1e-5), 0.0, -norm, float("nan"), float("inf")):
        assert check_psi_piece(CONFIG, 1, data, stated) is PieceRefusal.NORM_MISMATCH
    data, norm = expert_piece()
    assert check_expert_blob(CONFIG, 1, data, base().__getitem__, norm * (1 + 1e-5)) is PieceRefusal.NORM_MISMATCH


def test_a_zero_delta_has_norm_zero_exactly() -> None:
    zeros = np.zeros(NUM_VALUES, dtype=np.float32)
    data, _ = encode_psi_piece("int8", zeros, zeros)
    assert check_psi_piece(CONFIG, 1, data, 0.0) is None
    assert check_psi_piece(CONFIG, 1, data, 1e-30) is PieceRefusal.NORM_MISMATCH


def test_a_norm_above_the_bound_is_refused() -> None:
    data, norm = psi_piece()
    assert check_psi_piece(CONFIG, 1, data, norm, max_squared_norm=norm / 2) is PieceRefusal.NORM_BOUND
    data, norm = expert_piece()
    refusal = check_expert_blob(CONFIG, 1, data, base().__getitem__, norm, max_squared_norm=norm / 2)
    assert refusal is PieceRefusal.NORM_BOUND


def test_values_that_are_not_finite_are_refused() -> None:
    for bad in (np.nan, np.inf):
        scale = np.full(-(-NUM_VALUES // 256), bad, dtype=np.float32)
        data = encode_tensors(psi_piece_specs("int8", NUM_VALUES), (scale, np.ones(NUM_VALUES, np.int8)))
        assert check_psi_piece(CONFIG, 1, data, 1.0) is PieceRefusal.NOT_FINITE
    specs = expert_blob_specs(CONFIG, 1)
    arrays = [np.zeros(spec.shape, np.uint16) for spec in specs]
    arrays[4][0, 0] = 0x7F80
    refusal = check_expert_blob(CONFIG, 1, encode_tensors(specs, arrays), base().__getitem__, 1.0)
    assert refusal is PieceRefusal.NOT_FINITE


def wrong_forms(good: bytes) -> list[bytes]:
    return [
        b"",
        good[:-1],
        good + b"\0",
        good.replace(b'"BF16"', b'"FP16"').replace(b'"I8"', b'"U8"'),
        b"cos\nsystem\n(S'touch marker'\ntR.",
    ]


def test_any_other_form_is_refused_as_schema() -> None:
    data, norm = psi_piece()
    for wrong in wrong_forms(data):
        assert check_psi_piece(CONFIG, 1, wrong, norm) is PieceRefusal.SCHEMA
    assert check_psi_piece(CONFIG, 2, data, norm) is PieceRefusal.SCHEMA
    data, norm = expert_piece()
    for wrong in wrong_forms(data):
        assert check_expert_blob(CONFIG, 1, wrong, base().__getitem__, norm) is PieceRefusal.SCHEMA
    assert check_expert_blob(CONFIG, 0, data, base().__getitem__, norm) is PieceRefusal.SCHEMA


def test_a_run_with_other_codecs_refuses_the_piece_as_schema() -> None:
    fp32 = CONFIG.model_copy(update={"codecs": CodecConfig(expert="fp32", psi="fp32")})
    data, norm = psi_piece()
    assert check_psi_piece(fp32, 1, data, norm) is PieceRefusal.SCHEMA
    data, norm = expert_piece()
    assert check_expert_blob(fp32, 1, data, base().__getitem__, norm) is PieceRefusal.SCHEMA


def test_norms_agree_within_a_millionth() -> None:
    assert norms_agree(1.0, 1.0)
    assert norms_agree(1.0 + 9e-7, 1.0)
    assert not norms_agree(1.0 + 2e-6, 1.0)
    assert norms_agree(0.0, 0.0)
    assert not norms_agree(float("inf"), float("inf"))


def test_reasons_are_the_numbers_that_travel() -> None:
    assert {reason.name: int(reason) for reason in PieceRefusal} == {
        "SCHEMA": 1,
        "NOT_FINITE": 2,
        "NORM_MISMATCH": 3,
        "NORM_BOUND": 4,
        "MISSING": 5,
        "BASE_ROW": 6,
    }


def test_reasons_have_the_numbers_of_the_wire() -> None:
    assert {reason.name: reason.value for reason in PieceRefusal} == {
        reason.name: reason.value for reason in RefusalReason if reason < RefusalReason.SUPERSEDED
    }
