"""From deltas to pieces, and from pieces to a part's result."""

import numpy as np
import pytest

from spes_p2p.config import CodecConfig, ModelConfig, OuterConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.errors import SchemaError
from spes_p2p.ids import PeerId
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.training.checks import check_expert_blob, check_psi_piece
from spes_p2p.training.codecs import psi_piece_values
from spes_p2p.training.layout import PartState, first_state, flatten, part_from_bytes, part_to_bytes, psi_layout
from spes_p2p.training.pieces import (
    PieceOfCut,
    aggregate_part,
    encode_expert_update,
    encode_psi_update,
    zero_residual,
)

MODEL = ModelConfig(width=8, num_layers=2, num_heads=2, num_kv_heads=2, num_experts=4, expert_width=6, vocab_size=32)
CONFIG = RunConfig(model=MODEL, experts_per_shard=2, protocol=ProtocolConfig(parts=3))
LAYOUT = psi_layout(CONFIG)


def test_an_update_has_a_piece_for_each_part_that_any_acker_accepts() -> None:
    delta = flatten(LAYOUT, initial_psi(MODEL, 1))
    pieces = list(encode_psi_update(CONFIG, delta, zero_residual(CONFIG)))
    assert [piece.index for piece, _ in pieces] == [0, 1, 2]
    for piece, _ in pieces:
        assert check_psi_piece(CONFIG, piece.index, piece.data, piece.squared_norm) is None


def test_decoded_values_and_new_residual_make_up_the_delta_and_the_old_residual() -> None:
    delta = flatten(LAYOUT, initial_psi(MODEL, 1))
    residual = np.random.default_rng(0).standard_normal(LAYOUT.num_values).astype(np.float32) * np.float32(1e-3)
    pieces = list(encode_psi_update(CONFIG, delta, residual))
    decoded = np.concatenate([psi_piece_values(CONFIG, piece.index, piece.data) for piece, _ in pieces])
    left_over = np.concatenate([part for _, part in pieces])
    np.testing.assert_allclose(decoded + left_over, delta.astype(np.float64) + residual, atol=1e-9)


def test_a_residual_of_another_length_is_refused() -> None:
    with pytest.raises(SchemaError):
        list(encode_psi_update(CONFIG, zero_residual(CONFIG), zero_residual(CONFIG)[1:]))


def test_an_expert_update_is_one_that_any_acker_accepts() -> None:
    base = initial_shard(MODEL, 2, 0, 1)
    piece = encode_expert_update(CONFIG, 1, initial_shard(MODEL, 2, 1, 1), base.__getitem__)
    assert piece.index == 1
    assert check_expert_blob(CONFIG, 1, piece.data, base.__getitem__, piece.squared_norm) is None


WHERE = LAYOUT.part_slice(1)
START = flatten(LAYOUT, initial_psi(MODEL, 0))[WHERE]


def pieces_of(config: RunConfig, seeds: tuple[int, int]) -> tuple[list[PieceOfCut], np.ndarray]:
    """Pieces of two updates for part 1, the second of twice the weight, and the mean of their deltas."""
    pieces, deltas = [], []
    for number, seed in enumerate(seeds):
        delta = flatten(LAYOUT, initial_psi(MODEL, seed))
        encoded = [piece for piece, _ in encode_psi_update(config, delta, zero_residual(config))]
        pieces.append(PieceOfCut(peer=PeerId(bytes([number])), data=encoded[1].data, weight=number + 1))
        deltas.append(delta[WHERE].astype(np.float64))
    return pieces, (deltas[0] + 2 * deltas[1]) / 3


def test_a_part_is_the_previous_one_plus_the_mean_of_the_pieces() -> None:
    config = CONFIG.model_copy(update={"codecs": CodecConfig(psi="fp32")})
    pieces, mean = pieces_of(config, (1, 2))
    before = part_to_bytes(PartState(psi=START))
    result = part_from_bytes(LAYOUT, 1, aggregate_part(config, 1, before, pieces)).psi
    np.testing.assert_allclose(result, START + mean, atol=1e-7)
    assert aggregate_part(config, 1, before, pieces[::-1]) == result.tobytes()


def test_a_part_with_momentum_hands_it_from_result_to_result() -> None:
    outer = OuterConfig(rule="nesterov", learning_rate=0.5, momentum=0.8)
    config = CONFIG.model_copy(update={"codecs": CodecConfig(psi="fp32"), "training": TrainingConfig(outer=outer)})
    layout = psi_layout(config)
    data = part_to_bytes(first_state(layout, START))
    psi, momentum = START.astype(np.float64), np.zeros(START.size)
    for seeds in ((1, 2), (3, 4), (5, 6)):
        pieces, mean = pieces_of(config, seeds)
        data = aggregate_part(config, 1, data, pieces)
        momentum = 0.8 * momentum + mean
        psi = psi + 0.5 * (mean + 0.8 * momentum)
        state = part_from_bytes(layout, 1, data)
        assert state.momentum is not None
        np.testing.assert_allclose(state.psi, psi, atol=1e-7)
        np.testing.assert_allclose(state.momentum, momentum, atol=1e-7)
    assert aggregate_part(config, 1, data, pieces) == aggregate_part(config, 1, data, pieces[::-1])
