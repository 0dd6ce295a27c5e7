"""Agreed means, against the same rules written plainly."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.config import OuterConfig
from spes_p2p.errors import NotFiniteError
from spes_p2p.ids import PeerId
from spes_p2p.training import aggregate
from spes_p2p.training.aggregate import Contribution, RobustRule, owners_mean
from spes_p2p.training.layout import PartState


def contribution(number: int, delta: list[float] | np.ndarray, weight: float = 1, clip: float = 1) -> Contribution:
    return Contribution(
        peer=PeerId(bytes([number])), delta=np.asarray(delta, dtype=np.float64), weight=weight, clip=clip
    )


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def part_result(previous: np.ndarray, contributions: list[Contribution], robust: RobustRule = "mean") -> np.ndarray:
    return aggregate.part_result(PartState(psi=previous), contributions, robust, OuterConfig()).psi


def test_the_mean_is_weighted() -> None:
    result = part_result(f32(10, 20), [contribution(1, [1, -4], weight=3), contribution(2, [5, 4], weight=1)])
    assert result.dtype == np.float32
    assert result.tolist() == [12, 18]


def test_equal_weights_reproduce_the_plain_mean() -> None:
    deltas = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    result = part_result(f32(*[0.0] * 100), [contribution(i, delta, weight=7) for i, delta in enumerate(deltas)])
    np.testing.assert_allclose(result, deltas.mean(axis=0), atol=1e-7)


def test_a_clip_factor_shrinks_the_delta_and_not_its_weight() -> None:
    result = part_result(f32(0), [contribution(1, [8], weight=1, clip=0.25), contribution(2, [2], weight=1)], "clipped")
    assert result.tolist() == [2]


def test_where_most_deltas_are_zero_a_clip_factor_of_zero_leaves_the_part_as_it_was() -> None:
    contributions = [contribution(1, [0, 0]), contribution(2, [0, 0]), contribution(3, [8, -8], clip=0)]
    assert part_result(f32(3, -5), contributions, "clipped").tolist() == [3, -5]


def test_the_result_is_rounded_once() -> None:
    # 1 + 2^-24 + 2^-52 lies just above the middle of two fp32 values; a delta rounded to fp32 first would fall to 1.
    result = part_result(f32(1), [contribution(1, [2**-24 + 2**-52])])
    assert result.tolist() == [1 + 2**-23]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), rule=st.sampled_from(["mean", "clipped", "trimmed"]))
def test_arrival_order_changes_no_bit(seed: int, rule: str) -> None:
    generator = np.random.default_rng(seed)
    contributions = [
        contribution(i, generator.standard_normal(50) * 10.0**i, weight=float(generator.integers(1, 99)))
        for i in range(6)
    ]
    previous = generator.standard_normal(50).astype(np.float32)
    shuffled = random.Random(seed).sample(contributions, k=6)
    assert part_result(previous, shuffled, rule).tobytes() == part_result(previous, contributions, rule).tobytes()


def test_accumulation_follows_the_sorted_peers_in_float64() -> None:
    generator = np.random.default_rng(5)
    deltas = generator.standard_normal((5, 40)) * 1e-3
    weights = [40960.0, 20480.0, 0.5, 3.0, 81920.0]
    previous = generator.standard_normal(40).astype(np.float32)
    result = part_result(previous, [contribution(i, deltas[i], weights[i]) for i in (3, 1, 4, 0, 2)])
    for at in range(40):
        total, weight_total = 0.0, 0.0
        for i in range(5):
            total += float(deltas[i][at]) * weights[i]
            weight_total += weights[i]
        assert result[at] == np.float32(float(previous[at]) + total / weight_total)


def test_the_trimmed_mean_leaves_out_a_third_at_most_on_either_side() -> None:
    deltas = [[1e30], [1], [2], [-1e30]]
    contributions = [contribution(i, delta, weight=i + 1) for i, delta in enumerate(deltas)]
    assert part_result(f32(0), contributions, "trimmed").tolist() == [np.float32((1 * 2 + 2 * 3) / 5)]
    assert part_result(f32(0), contributions[1:3], "trimmed").tolist() == [np.float32((1 * 2 + 2 * 3) / 5)]


def test_the_trimmed_mean_of_seven_keeps_the_middle_three_of_each_coordinate() -> None:
    deltas = np.array([[1, 9], [2, 8], [3, 7], [4, 6], [5, 5], [6, 4], [700, -300]], dtype=np.float64)
    result = part_result(f32(0, 0), [contribution(i, delta) for i, delta in enumerate(deltas)], "trimmed")
    assert result.tolist() == [4, 6]


def test_nothing_is_averaged_without_updates_or_twice_for_one_peer() -> None:
    with pytest.raises(ValueError, match="kept"):
        part_result(f32(1), [])
    with pytest.raises(ValueError, match="two updates"):
        part_result(f32(1), [contribution(1, [1]), contribution(1, [2])])


@pytest.mark.parametrize(
    "wrong",
    [
        contribution(1, [1, 2]),
        contribution(1, [1], weight=0),
        contribution(1, [1], weight=-1),
        contribution(1, [1], weight=float("nan")),
        contribution(1, [1], clip=-0.1),
        contribution(1, [1], clip=1.5),
        contribution(1, [1], clip=float("nan")),
    ],
)
def test_shapes_weights_and_factors_are_checked(wrong: Contribution) -> None:
    with pytest.raises(ValueError, match=r"delta|weight|clip"):
        part_result(f32(1), [wrong])


def test_a_mean_that_overflows_fp32_is_an_error_and_not_an_infinity() -> None:
    with pytest.raises(NotFiniteError):
        part_result(f32(3e38), [contribution(1, [3e38])])


def test_one_owner_gives_the_value_to_the_bit() -> None:
    value = f32(-0.0, 1e-45, 3.3)
    result = owners_mean([value], [0])
    assert result.tobytes() == value.tobytes()
    result[0] = 5
    assert value[0] == 0


def test_several_owners_are_weighted_by_tokens_at_least_one_each() -> None:
    assert owners_mean([f32(0, 4), f32(8, 0)], [3, 1]).tolist() == [2, 3]
    assert owners_mean([f32(0), f32(8)], [0, 3]).tolist() == [6]


def test_a_row_without_a_blob_has_no_value() -> None:
    with pytest.raises(ValueError, match="0 values"):
        owners_mean([], [])
