import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spes_p2p.config import TrainingConfig
from spes_p2p.training.moments import CPU_CHUNK_VALUES, Moments, moments_bytes
from spes_p2p.training.optim import NamedAdamW

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


def test_weights_with_a_ratio_have_their_own_rate():
    a, b, c = weight(1.0), weight(1.0), weight(1.0)
    for at in ({"a": a, "b": b}, {"c": c}):
        optimizer = NamedAdamW(CONFIG, at, rate_ratios={"a": 0.5})
        step(optimizer, {parameter: [0.2] for parameter in at.values()}, rate=0.1 if "a" in at else 0.05)
    assert a.item() == c.item() > b.item()


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


# ---------------------------------------------------------------------------------------------- both formats of moments

SIZES = {"matrix": (96, 100), "norm": (64,), "bank": (3, 32, 65)}
"""9600 and 6240 values are packed, and neither is whole blocks; 64 are too few."""


def weights(seed: int = 0, sizes=SIZES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in sizes.items()}


def set_gradients(parameters, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def after_steps(format_, num_steps: int, skip=()) -> tuple[NamedAdamW, dict[str, nn.Parameter]]:
    held = weights()
    optimizer = NamedAdamW(CONFIG, held, format_)
    for number in range(num_steps):
        set_gradients(held.values(), number, scale=0.02)
        for name in skip:
            held[name].grad = None
        optimizer.step(0.01)
    return optimizer, held


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_fp32_equals_torchs_adamw_with_its_clipping(scale):
    ours, theirs = weights(), weights()
    optimizer = NamedAdamW(CONFIG, ours)
    reference = torch.optim.AdamW(
        theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False, fused=False
    )
    for number in range(5):
        set_gradients(ours.values(), number, scale)
        set_gradients(theirs.values(), number, scale)
        norm = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
        assert optimizer.step(0.01) == pytest.approx(float(norm), rel=1e-6)
    for name, ours_ in ours.items():
        torch.testing.assert_close(ours_, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format_", ["fp32", "int8"])
def test_a_missing_gradient_gives_the_bits_of_a_zero_gradient(format_):
    without, missing = after_steps(format_, 4, skip=("matrix",))
    held = weights()
    zero = NamedAdamW(CONFIG, held, format_)
    for number in range(4):
        set_gradients(held.values(), number, scale=0.02)
        held["matrix"].grad.zero_()
        zero.step(0.01)
    assert all(torch.equal(missing[name], held[name]) for name in SIZES)
    assert without.moments()["matrix"].num_steps == 4


@pytest.mark.parametrize("format_", ["fp32", "int8"])
def test_the_same_steps_give_the_same_bits(format_):
    (first, one), (second, two) = after_steps(format_, 5), after_steps(format_, 5)
    assert all(torch.equal(one[name], two[name]) for name in SIZES)
    for a, b in zip(first.state_tensors(), second.state_tensors(), strict=True):
        assert torch.equal(a, b)


def test_int8_moments_take_a_quarter_and_small_weights_keep_fp32():
    optimizer, held = after_steps("int8", 1)
    dtypes = {name: values.moments.mean.dtype for name, values in optimizer.held_moments().items()}
    assert dtypes == {"matrix": torch.int8, "norm": torch.float32, "bank": torch.int8}
    for format_, large in (("fp32", 8 * (9600 + 6240)), ("int8", 2 * 260 * (38 + 25))):
        optimizer, held = after_steps(format_, 1)
        size_bytes = sum(tensor.nbytes for tensor in optimizer.state_tensors())
        assert size_bytes == large + 8 * 64
        assert size_bytes == sum(moments_bytes(weight.numel(), format_) for weight in held.values())


def test_int8_moments_follow_those_in_fp32():
    exact, held = after_steps("fp32", 40)
    packed, packed_held = after_steps("int8", 40)
    for name in ("matrix", "bank"):
        wanted, got = exact.moments()[name], packed.moments()[name]
        assert np.linalg.norm(got.mean - wanted.mean) < 0.1 * np.linalg.norm(wanted.mean)
        assert np.linalg.norm(got.square - wanted.square) < 0.05 * np.linalg.norm(wanted.square)
        moved = (held[name] - weights()[name]).norm()
        assert (packed_held[name] - held[name]).norm() < 0.05 * moved
    assert torch.equal(packed_held["norm"], held["norm"])


def test_int8_moments_train_as_far_as_fp32():
    """Least squares with columns of very unlike sizes, so that second moments of a block span seven decades."""
    generator = torch.Generator().manual_seed(5)
    inputs_ND = torch.randn(256, 64, generator=generator) * torch.logspace(-2, 1, 64)
    targets_NO = inputs_ND @ torch.randn(64, 80, generator=generator)
    losses = {}
    for format_ in ("fp32", "int8"):
        weight_DO = nn.Parameter(torch.zeros(64, 80))
        optimizer = NamedAdamW(CONFIG, {"w": weight_DO}, format_)
        history = []
        for number in range(400):
            rows = torch.arange(number * 32, number * 32 + 32) % 256
            loss = (inputs_ND[rows] @ weight_DO - targets_NO[rows]).square().mean()
            loss.backward()
            optimizer.step(0.02)
            history.append(loss.item())
        losses[format_] = history
    assert losses["int8"][-1] < 0.01 * losses["int8"][0]
    assert np.mean(losses["int8"][-50:]) == pytest.approx(np.mean(losses["fp32"][-50:]), rel=0.1)
    assert max(losses["int8"]) < 1.05 * max(losses["fp32"])


def test_int8_moments_follow_gradients_that_change_slowly():
    """With beta2 0.99 a second moment moves by less than half of the gap between two codes, here 18 %, in a step."""
    config = CONFIG.model_copy(update={"beta2": 0.99, "clip_norm": 1e9})
    squares = {}
    for format_ in ("fp32", "int8"):
        parameter = nn.Parameter(torch.zeros(4096))
        optimizer = NamedAdamW(config, {"w": parameter}, format_)
        for number in range(800):
            parameter.grad = torch.full((4096,), 0.03 if number < 200 else 0.02)
            parameter.grad[::256] = 3.0  # the largest of each block
            optimizer.step(1e-4)
        squares[format_] = optimizer.moments()["w"].square.reshape(-1, 256)[:, 1:].mean()
    assert squares["int8"] == pytest.approx(squares["fp32"], rel=0.1)


def test_a_gradient_that_vanishes_does_not_make_int8_explode():
    held = weights(sizes={"w": (4096,)})
    optimizer = NamedAdamW(CONFIG, held, "int8")
    for number in range(30):
        gradient = torch.full((4096,), 1e-9 if number else 1e-3)
        gradient[0] = 1.0
        held["w"].grad = gradient
        before = held["w"].detach().clone()
        optimizer.step(0.01)
        # AdamW's own bound: |mean| <= (1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1**2 / beta2) * sqrt(square)
        assert (held["w"] - before * (1 - 0.001)).abs().max() < 0.01 * 1.2


@pytest.mark.parametrize("first", ["fp32", "int8"])
@pytest.mark.parametrize("second", ["fp32", "int8"])
def test_held_moments_pass_between_the_formats(first, second):
    giver, held = after_steps(first, 3)
    taker = NamedAdamW(CONFIG, weights(), second)
    taker.load_held(giver.held_moments())
    assert {name: values.num_steps for name, values in taker.moments().items()} == dict.fromkeys(held, 3)
    for name, values in giver.moments().items():
        got = taker.moments()[name]
        if (first, second) == ("fp32", "int8") and name != "norm":
            assert np.linalg.norm(got.mean - values.mean) < 0.02 * np.linalg.norm(values.mean)
            assert np.linalg.norm(got.square - values.square) < 0.02 * np.linalg.norm(values.square)
        else:
            np.testing.assert_array_equal(got.mean, values.mean)
            np.testing.assert_array_equal(got.square, values.square)
    dtypes = {name: values.moments.mean.dtype for name, values in taker.held_moments().items()}
    assert dtypes["bank"] == (torch.int8 if second == "int8" else torch.float32)


def test_int8_moments_come_back_through_fp32_with_the_same_bits():
    giver, _ = after_steps("int8", 3)
    through = NamedAdamW(CONFIG, weights(), "fp32")
    through.load_moments(giver.moments())
    back = NamedAdamW(CONFIG, weights(), "int8")
    back.load_moments(through.moments())
    for name, values in back.moments().items():
        np.testing.assert_array_equal(values.mean, giver.moments()[name].mean)
        np.testing.assert_array_equal(values.square, giver.moments()[name].square)


def test_held_moments_of_another_size_are_refused():
    giver, _ = after_steps("int8", 1)
    taker = NamedAdamW(CONFIG, weights(sizes={"matrix": (96, 90)}), "int8")
    with pytest.raises(ValueError, match="no trained tensor matrix"):
        taker.load_held({"matrix": giver.held_moments()["matrix"]})


def test_a_weight_whose_values_do_not_lie_in_order_is_refused():
    with pytest.raises(ValueError, match="w do not lie in order"):
        NamedAdamW(CONFIG, {"w": nn.Parameter(torch.zeros(4, 5).t())})


class LargestResult(TorchDispatchMode):
    """The largest tensor that any operation makes anew, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if _is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("format_", ["fp32", "int8"])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_step_makes_nothing_of_the_size_of_a_weight(format_, has_gradient):
    held = {"w": nn.Parameter(torch.ones(1 << 19)), "v": nn.Parameter(torch.ones(1 << 19))}
    optimizer = NamedAdamW(CONFIG, held, format_)
    set_gradients(held.values(), 0)
    optimizer.step(0.01)
    if has_gradient:
        set_gradients(held.values(), 1)
    with LargestResult() as seen:
        optimizer.step(0.01)
    # buffers of a chunk are made once; what else appears are scalars and the scales of a chunk
    assert seen.largest_bytes <= 4 * CPU_CHUNK_VALUES
    assert 4 * CPU_CHUNK_VALUES < 4 * (1 << 19) / 4


def test_a_gradient_is_freed_before_the_next_weight_is_stepped():
    held = {name: nn.Parameter(torch.ones(8)) for name in "abc"}
    optimizer = NamedAdamW(CONFIG, held)
    set_gradients(held.values(), 0)
    left = []
    adamw = optimizer._adamw

    def looking(*arguments):
        left.append(sum(weight.grad is not None for weight in held.values()))
        adamw(*arguments)

    optimizer._adamw = looking
    optimizer.step(0.01)
    assert left == [3, 2, 1]
    assert all(weight.grad is None for weight in held.values())
