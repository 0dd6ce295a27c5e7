import numpy as np
import pytest
from pydantic import ValidationError

from spes_p2p.training.lab.experiment import OuterConfig, PairConfig
from spes_p2p.training.lab.outer_rules import nesterov_step, pair_step, pairs_of


def test_nesterov_adds_the_momentum_of_earlier_rounds():
    config = OuterConfig(learning_rate=0.5, momentum=0.8)
    before, delta = np.array([1.0], dtype=np.float32), np.array([0.1])
    first, momentum = nesterov_step(before, delta, np.zeros(1), config)
    assert first == pytest.approx([1 + 0.5 * (0.1 + 0.8 * 0.1)])
    second, _ = nesterov_step(first, delta, momentum, config)
    assert second == pytest.approx(first + 0.5 * (0.1 + 0.8 * (0.8 * 0.1 + 0.1)))


def test_a_pair_follows_the_formula_and_keeps_its_mean_motion():
    config = PairConfig(momentum=0.5, delta=0.7, pull=0.7)
    slow = [np.array([1.0], dtype=np.float32), np.array([3.0], dtype=np.float32)]
    fast = [np.array([1.2], dtype=np.float32), np.array([3.4], dtype=np.float32)]
    after, velocity = pair_step(slow, fast, [np.array([0.1]), np.array([-0.1])], config)
    assert velocity[0] == pytest.approx([0.5 * 0.1 + 0.7 * 0.3 + 0.7 * (2 - 1)])
    assert velocity[1] == pytest.approx([0.5 * -0.1 + 0.7 * 0.3 + 0.7 * (2 - 3)])
    assert [float(a[0]) for a in after] == pytest.approx([1 + float(velocity[0][0]), 3 + float(velocity[1][0])])


@pytest.mark.parametrize(("momentum", "pull"), [(0.9, 0.7), (0.5, 1.5)])
def test_settings_under_which_replicas_drift_apart_are_refused_with_the_bound(momentum, pull):
    bound = f"{2 * (1 - momentum**2):.3g}"
    with pytest.raises(ValidationError, match=bound):
        PairConfig(momentum=momentum, pull=pull)


def spread_after(momentum: float, pull: float, num_rounds: int) -> float:
    """Spread of many pairs of replicas that do not train, paired anew in each round."""
    config = PairConfig.model_construct(momentum=momentum, delta=0.7, pull=pull)
    slow = [np.array([float(place)], dtype=np.float32) for place in range(64)]
    velocity = [np.zeros(1) for _ in slow]
    for number in range(num_rounds):
        for pair in pairs_of(64, 0, number):
            own = [slow[place] for place in pair]
            moved, speed = pair_step(own, own, [velocity[place] for place in pair], config)
            for place, values, rate in zip(pair, moved, speed, strict=True):
                slow[place], velocity[place] = values, rate
    return float(np.std(np.concatenate(slow)))


def test_the_bound_separates_replicas_that_meet_from_replicas_that_drift():
    at_first = spread_after(0.5, 0.7, 0)
    assert spread_after(0.5, 0.7, 60) < 1e-3 * at_first
    assert spread_after(0.9, 0.7, 60) > 5 * at_first


def test_everybody_is_in_one_pair_and_pairs_change_with_the_round():
    pairs = pairs_of(8, 1, 1)
    assert sorted(place for pair in pairs for place in pair) == list(range(8))
    assert pairs == pairs_of(8, 1, 1)
    assert pairs != pairs_of(8, 1, 2)
