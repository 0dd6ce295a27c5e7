"""Outer steps of psi: by hand, against torch's SGD, and where they stop being stable."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.config import OuterConfig, RunConfig, TrainingConfig, nesterov_bound
from spes_p2p.digests import digest
from spes_p2p.errors import ConfigError, NotFiniteError
from spes_p2p.training.layout import PartState
from spes_p2p.training.outer import outer_step

MEAN = OuterConfig()


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> OuterConfig:
    return OuterConfig(rule="nesterov", learning_rate=learning_rate, momentum=momentum)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def f64(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def momentum_of(state: PartState) -> np.ndarray:
    assert state.momentum is not None
    return state.momentum


def test_three_rounds_of_nesterov_are_those_worked_out_by_hand() -> None:
    # eta = mu = 1/2: m <- m/2 + mean, psi <- psi + (mean + m/2) / 2. All values are exact in fp32.
    state = PartState(psi=f32(1, -2), momentum=f32(0, 0))
    expected = [
        ((4, 0), (4, 0), (4, -2)),  # psi 1 + (4 + 2) / 2; -2 + 0
        ((0, 8), (2, 8), (4.5, 4)),  # m 4/2 + 0; psi 4 + (0 + 1) / 2; -2 + (8 + 4) / 2
        ((-2, -4), (-1, 0), (3.25, 2)),  # m 1 - 2, 4 - 4; psi 4.5 + (-2 - 0.5) / 2; 4 + (-4 + 0) / 2
    ]
    for mean, momentum, psi in expected:
        state = outer_step(nesterov(0.5, 0.5), state, f64(*mean))
        assert momentum_of(state).tolist() == list(momentum)
        assert state.psi.tolist() == list(psi)


def test_nesterov_is_the_outer_optimizer_of_diloco_as_torch_has_it() -> None:
    generator = np.random.default_rng(3)
    psi = generator.standard_normal(200).astype(np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(psi.astype(np.float64)))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    state = PartState(psi=psi, momentum=np.zeros_like(psi))
    for _ in range(6):
        mean = generator.standard_normal(200) * 1e-2
        state = outer_step(nesterov(), state, mean)
        weight.grad = torch.from_numpy(-mean)
        sgd.step()
    np.testing.assert_allclose(state.psi, weight.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(momentum_of(state), -sgd.state[weight]["momentum_buffer"].numpy(), atol=1e-7)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_nesterov_with_rate_one_and_no_momentum_is_the_mean_to_the_bit(seed: int) -> None:
    generator = np.random.default_rng(seed)
    psi = (generator.standard_normal(300) * 10.0 ** generator.integers(-45, 30, 300)).astype(np.float32)
    mean = generator.standard_normal(300) * 10.0 ** generator.integers(-45, 30, 300)
    psi[:4], mean[2:8] = f32(0, -0.0, 0, -0.0), 0.0
    momentum = generator.standard_normal(300).astype(np.float32)
    moved = outer_step(nesterov(1.0, 0.0), PartState(psi=psi, momentum=momentum), mean)
    assert moved.psi.tobytes() == outer_step(MEAN, PartState(psi=psi), mean).psi.tobytes()


def test_psi_is_rounded_once_and_from_the_momentum_before_its_rounding() -> None:
    # m = 1 + 2^-25 rounds to 1, yet 2 m + ... reaches the value next to 3 only with the 2^-25 in it
    state = outer_step(nesterov(1.0, 0.5), PartState(psi=f32(2**-24), momentum=f32(2**-24)), f64(1))
    assert momentum_of(state).tolist() == [1]
    exact = 2**-24 + 1 + 0.5 * (1 + 2**-25)
    assert state.psi.tolist() == [np.float32(exact)]
    assert np.float32(exact) != np.float32(2**-24 + 1 + 0.5)


def test_a_step_changes_none_of_what_it_is_given() -> None:
    psi, momentum, mean = f32(1, 2), f32(3, 4), f64(5, 6)
    outer_step(nesterov(), PartState(psi=psi, momentum=momentum), mean)
    assert (psi.tolist(), momentum.tolist(), mean.tolist()) == ([1, 2], [3, 4], [5, 6])


@pytest.mark.parametrize(
    ("psi", "momentum", "mean", "what"), [(3e38, 0.0, 1e38, "psi"), (0.0, 0.0, 2e38, "psi"), (-3e38, 3e38, 1e38, "mom")]
)
def test_what_overflows_fp32_is_an_error_and_no_infinity(psi: float, momentum: float, mean: float, what: str) -> None:
    with pytest.raises(NotFiniteError, match=what):
        outer_step(nesterov(1.0, 0.9), PartState(psi=f32(psi), momentum=f32(momentum)), f64(mean))


def test_a_state_must_have_momentum_if_and_only_if_the_rule_has() -> None:
    with pytest.raises(ValueError, match="mean"):
        outer_step(MEAN, PartState(psi=f32(1), momentum=f32(0)), f64(1))
    with pytest.raises(ValueError, match="nesterov"):
        outer_step(nesterov(), PartState(psi=f32(1)), f64(1))


def distance_after(outer: OuterConfig, share: float, num_rounds: int = 400) -> float:
    """From 1, when every round of training goes this share of the way to 0."""
    state = PartState(psi=f32(1), momentum=f32(0))
    for _ in range(num_rounds):
        state = outer_step(outer, state, -share * state.psi.astype(np.float64))
        if abs(state.psi[0]) > 1e6:
            break
    return float(np.abs(state.psi[0]))


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.99])
def test_nesterov_settles_below_its_bound_and_diverges_above_it(momentum: float) -> None:
    bound = nesterov_bound(momentum)
    for share in (1.0, 0.5, 0.1):
        assert distance_after(nesterov(0.95 * bound, momentum), share) < 0.2
    outside = OuterConfig.model_construct(rule="nesterov", learning_rate=1.05 * bound, momentum=momentum)
    assert distance_after(outside, 1.0) > 1e6


def test_the_bound_is_two_without_momentum_and_four_thirds_with_all_of_it() -> None:
    assert nesterov_bound(0.0) == 2
    assert nesterov_bound(1.0) == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('rule = "nesterov"\nlearning_rate = 1.4', ["learning_rate 1.4", "momentum 0.9", "1.357"]),
        ('rule = "nesterov"\nlearning_rate = 2\nmomentum = 0', ["learning_rate 2.0", "2.000"]),
        ('rule = "nesterov"\nlearning_rate = 0', ["learning_rate 0.0", "above 0"]),
        ('rule = "nesterov"\nlearning_rate = nan', ["learning_rate nan"]),
        ('rule = "nesterov"\nmomentum = 1', ["momentum 1.0", "below 1"]),
        ('rule = "nesterov"\nmomentum = -0.1', ["momentum -0.1", "at least 0"]),
        ("learning_rate = 0.5", ["leave them out"]),
        ('rule = "noloco"', ["'mean'", "'nesterov'"]),
    ],
)
def test_settings_that_diverge_or_mean_nothing_are_refused(tmp_path: Path, fields: str, words: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[training.outer]\n{fields}\n")
    with pytest.raises(ConfigError, match=re.escape("training.outer")) as refused:
        RunConfig.from_toml(file)
    for word in words:
        assert word in str(refused.value)


def test_another_rate_of_psi_is_part_of_the_run_id() -> None:
    faster = RunConfig(training=TrainingConfig(psi_lr_ratio=2.0))
    assert b'"psi_lr_ratio":2.0' in faster.to_json()
    assert b'"psi_lr_ratio"' not in RunConfig().to_json()
    assert RunConfig.from_json(faster.to_json()) == faster


def test_the_rule_is_part_of_the_run_id_and_the_default_changes_none(tmp_path: Path) -> None:
    plain = RunConfig()
    assert b'"outer"' not in plain.to_json()
    # as it was before there was a choice
    assert digest("x", plain.to_json()).hex() == "9d14f3ac29c93e2f16a9b8dded6fcbc141d3feab122b07d428de76eb25fbe378"
    assert RunConfig.from_json(plain.to_json()) == plain
    heavy = RunConfig(training=TrainingConfig(outer=nesterov()))
    assert b'"outer":{"learning_rate":0.7,"momentum":0.9,"rule":"nesterov"}' in heavy.to_json()
    assert RunConfig.from_json(heavy.to_json()) == heavy
    with pytest.raises(ConfigError, match="canonical"):
        RunConfig.from_json(heavy.to_json().replace(b'"nesterov"', b'"mean"'))
