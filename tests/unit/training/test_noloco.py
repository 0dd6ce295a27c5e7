"""NoLoCo's step between two, who meets whom, and where the replicas drift apart."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from spes_p2p.errors import NotFiniteError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.training.noloco import (
    NoLoCoConfig,
    Replica,
    attraction_bound,
    learning_rate_bound,
    pair_step,
    pairs,
)

RUN = RunId(bytes(32))


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def peers(number: int) -> list[PeerId]:
    return [PeerId(bytes([place])) for place in range(number)]


def test_a_step_is_the_one_worked_out_by_hand() -> None:
    config = NoLoCoConfig(momentum=0.5, learning_rate=0.75, attraction=0.25)
    one = Replica(velocity=f32(2), slow=f32(1), fast=f32(5))
    other = Replica(velocity=f32(-4), slow=f32(9), fast=f32(9))
    # deltas 4 and 0, their mean 2; the mean of the slow weights is 5
    new_one, new_other = pair_step(config, one, other)
    assert new_one.velocity.tolist() == [1 + 1.5 + 1]
    assert new_other.velocity.tolist() == [-2 + 1.5 - 1]
    assert new_one.slow.tolist() == new_one.fast.tolist() == [4.5]
    assert new_other.slow.tolist() == new_other.fast.tolist() == [7.5]
    assert new_one.fast is not new_one.slow
    assert (one.slow.tolist(), other.fast.tolist()) == ([1], [9])


def test_who_comes_first_changes_no_bit() -> None:
    generator = np.random.default_rng(1)
    one, other = (
        Replica(**{name: generator.standard_normal(50).astype(np.float32) for name in ("velocity", "slow", "fast")})
        for _ in range(2)
    )
    here, there = pair_step(NoLoCoConfig(), one, other), pair_step(NoLoCoConfig(), other, one)
    assert [replica.slow.tobytes() for replica in here] == [replica.slow.tobytes() for replica in there[::-1]]


def test_with_equal_rates_one_tensor_per_exchange_would_do() -> None:
    # b mean(theta - phi) + b (mean(phi) - phi_i) = b (mean(theta) - phi_i)
    one = Replica(velocity=f32(0), slow=f32(1), fast=f32(2))
    other = Replica(velocity=f32(0), slow=f32(3), fast=f32(8))
    moved, _ = pair_step(NoLoCoConfig(momentum=0.5, learning_rate=0.5, attraction=0.5), one, other)
    assert moved.velocity.tolist() == [0.5 * (5 - 1)]


def test_what_overflows_is_an_error() -> None:
    far = Replica(velocity=f32(0), slow=f32(3e38), fast=f32(3.4e38))
    with pytest.raises(NotFiniteError, match="slow"):
        pair_step(NoLoCoConfig(momentum=0.0, learning_rate=1.9, attraction=1.0), far, far)


def test_pairs_follow_from_the_set_of_peers_the_run_and_the_round() -> None:
    assert pairs(RUN, 3, peers(8)) == pairs(RUN, 3, peers(8)[::-1])
    rounds = {pairs(RUN, number, peers(8)) for number in range(20)}
    assert len(rounds) > 15
    assert pairs(RunId(bytes([1] * 32)), 3, peers(8)) != pairs(RUN, 3, peers(8))


def test_everybody_meets_once_and_the_odd_one_rests() -> None:
    for number in (2, 5, 8):
        met = [peer for pair in pairs(RUN, 1, peers(number)) for peer in pair]
        assert len(met) == len(set(met)) == number // 2 * 2
        assert set(met) <= set(peers(number))
    assert pairs(RUN, 1, peers(1)) == pairs(RUN, 1, []) == ()
    resting = [set(peers(5)) - {peer for pair in pairs(RUN, turn, peers(5)) for peer in pair} for turn in range(40)]
    assert set.union(*resting) == set(peers(5))


def spread_after(config: NoLoCoConfig, num_peers: int, share: float, num_rounds: int) -> float:
    """Root mean square of the slow weights, from 1, when training goes this share of the way to 0; without training
    (share 0) of their distances from the mean."""
    ids = peers(num_peers)
    generator = np.random.default_rng(0)
    zeros = np.zeros(32, dtype=np.float32)
    replicas = {}
    for peer in ids:
        slow = generator.standard_normal(32).astype(np.float32)
        replicas[peer] = Replica(velocity=zeros, slow=slow, fast=slow)
    for number in range(num_rounds):
        for peer, replica in replicas.items():
            fast = (np.float32(1 - share) * replica.slow).astype(np.float32)
            replicas[peer] = Replica(velocity=replica.velocity, slow=replica.slow, fast=fast)
        for one, other in pairs(RUN, number, ids):
            replicas[one], replicas[other] = pair_step(config, replicas[one], replicas[other])
    slow = np.stack([replica.slow for replica in replicas.values()])
    centre = slow.mean(axis=0) if share == 0 else 0.0
    return float(np.sqrt(np.square(slow - centre).mean()))


def unchecked(momentum: float, learning_rate: float, attraction: float) -> NoLoCoConfig:
    return NoLoCoConfig.model_construct(momentum=momentum, learning_rate=learning_rate, attraction=attraction)


@pytest.mark.parametrize(("momentum", "num_rounds"), [(0.0, 60), (0.5, 80), (0.8, 150)])
def test_the_spread_dies_out_below_the_bound_of_attraction_and_grows_above_it(momentum: float, num_rounds: int) -> None:
    bound = attraction_bound(momentum)
    for part in (0.2, 0.9):
        inside = NoLoCoConfig(momentum=momentum, learning_rate=0.1, attraction=part * bound)
        assert spread_after(inside, 32, 0.0, num_rounds) < 0.2
    assert spread_after(unchecked(momentum, 0.1, 1.3 * bound), 32, 0.0, num_rounds) > 10


@pytest.mark.parametrize(("momentum", "attraction"), [(0.0, 1.0), (0.5, 0.7)])
def test_replicas_that_train_settle_below_the_bound_of_the_rate_and_diverge_above_it(
    momentum: float, attraction: float
) -> None:
    bound = learning_rate_bound(momentum, attraction)
    inside = NoLoCoConfig(momentum=momentum, learning_rate=0.9 * bound, attraction=attraction)
    assert spread_after(inside, 32, 1.0, 60) < 0.05
    assert spread_after(inside, 32, 0.3, 60) < 0.05
    assert spread_after(unchecked(momentum, 1.2 * bound, attraction), 32, 1.0, 60) > 10


def test_the_released_setting_is_stable_also_with_a_peer_that_rests() -> None:
    assert spread_after(NoLoCoConfig(), 7, 0.0, 60) < 0.01
    assert spread_after(NoLoCoConfig(), 7, 1.0, 60) < 0.01


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"momentum": 0.9}, ["attraction 0.7", "momentum 0.9", "2 (1 - momentum^2) = 0.380"]),
        ({"attraction": 1.5}, ["attraction 1.5", "= 1.500"]),
        ({"attraction": 0.0}, ["attraction 0.0", "above 0"]),
        ({"attraction": float("nan")}, ["attraction nan"]),
        ({"learning_rate": 2.5}, ["learning_rate 2.5", "below 2.430"]),
        ({"learning_rate": 0.0}, ["learning_rate 0.0"]),
        ({"momentum": 1.0}, ["momentum"]),
    ],
)
def test_settings_that_diverge_are_refused_with_the_bound(fields: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        NoLoCoConfig(**fields)
    for word in words:
        assert word in str(refused.value)
