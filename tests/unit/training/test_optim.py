import math

import numpy as np
import pytest
import torch
from torch import nn

from spes_p2p.config import TrainingConfig
from spes_p2p.training.optim import Moments, NamedAdamW

CONFIG = TrainingConfig(beta1=0.9, beta2=0.95, adam_eps=1e-8, weight_decay=0.1, clip_norm=1.0)


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def step(optimizer: NamedAdamW, gradients: dict[nn.Parameter, list[float]], rate: float = 0.1) -> float | None:
    for parameter, gradient in gradients.items():
        parameter.grad = torch.tensor(gradient)
    return optimizer.step(rate)


def test_steps_follow_adamw_with_decay_on_everything():
    a = weight(1.0)
    optimizer = NamedAdamW(CONFIG, {"a": a})
    value, mean, square = 1.0, 0.0, 0.0
    for number, gradient in enumerate((0.5, -0.25, 0.8), start=1):
        step(optimizer, {a: [gradient]})
        value *= 1 - 0.1 * 0.1
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        corrected = (mean / (1 - 0.9**number)) / (math.sqrt(square / (1 - 0.95**number)) + 1e-8)
        value -= 0.1 * corrected
        assert a.item() == pytest.approx(value, rel=1e-5)


def test_gradients_are_clipped_over_all_weights_together():
    a, b = weight(0.0), weight(0.0)
    optimizer = NamedAdamW(CONFIG, {"a": a, "b": b})
    assert step(optimizer, {a: [3.0], b: [4.0]}) == pytest.approx(5.0)
    moments = optimizer.moments()
    assert moments["a"].mean[0] == pytest.approx(0.1 * 3 / 5, rel=1e-5)
    assert moments["b"].mean[0] == pytest.approx(0.1 * 4 / 5, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    a, b = weight(1.0), weight(2.0)
    optimizer = NamedAdamW(CONFIG, {"a": a, "b": b})
    step(optimizer, {a: [0.1], b: [0.1]})
    before = (a.item(), b.item(), optimizer.moments()["a"].mean[0])
    assert step(optimizer, {a: [0.1], b: [bad]}) is None
    assert (a.item(), b.item(), optimizer.moments()["a"].mean[0]) == before
    assert a.grad is None


def test_a_weight_without_gradient_counts_as_zero_gradient():
    a, b = weight(1.0), weight(1.0)
    optimizer = NamedAdamW(CONFIG, {"a": a, "b": b})
    step(optimizer, {a: [0.5], b: [0.5]})
    step(optimizer, {a: [0.5]})
    moments = optimizer.moments()
    assert moments["b"].num_steps == 2
    assert moments["b"].mean[0] == pytest.approx(0.9 * 0.1 * 0.5, rel=1e-5)


def test_moments_of_weights_that_stay_are_kept_and_of_others_freed():
    a, b, c = weight(1.0), weight(1.0), weight(1.0)
    optimizer = NamedAdamW(CONFIG, {"a": a, "b": b})
    step(optimizer, {a: [0.5], b: [0.25]})
    optimizer.set_weights({"b": b, "c": c})
    assert {name: moments.num_steps for name, moments in optimizer.moments().items()} == {"b": 1}
    assert len(optimizer.state_tensors()) == 2
    step(optimizer, {b: [0.25], c: [0.25]})
    assert {name: moments.num_steps for name, moments in optimizer.moments().items()} == {"b": 2, "c": 1}


def test_moments_handed_over_continue_as_with_their_first_owner():
    a, b = weight(1.0, 2.0), weight(1.0, 2.0)
    first, second = NamedAdamW(CONFIG, {"a": a}), NamedAdamW(CONFIG, {"b": b})
    step(first, {a: [0.3, 0.4]})
    b.data.copy_(a.data)
    second.load_moments({"b": first.moments()["a"]})
    for _ in range(3):
        step(first, {a: [0.1, -0.2]})
        step(second, {b: [0.1, -0.2]})
    assert torch.equal(a, b)


def test_forgotten_moments_begin_again():
    a = weight(1.0)
    optimizer = NamedAdamW(CONFIG, {"a": a})
    step(optimizer, {a: [0.5]})
    optimizer.forget()
    assert optimizer.moments() == {}


def test_moments_of_another_shape_or_name_are_refused():
    optimizer = NamedAdamW(CONFIG, {"a": weight(1.0, 2.0)})
    short = Moments(mean=np.zeros(1, np.float32), square=np.zeros(1, np.float32), num_steps=1)
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="no trained tensor"):
            optimizer.load_moments({name: short})
