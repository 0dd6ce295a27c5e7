"""AdamW over named weights, whose moments outlive the rounds and can be handed over with a shard.

Decoupled weight decay on everything (Loshchilov and Hutter, arXiv 1711.05101). Gradients are clipped to a global norm
over all of the peer's trainables. A weight without a gradient in a step (an expert no token went to) is treated as
one with a zero gradient, so that its moments decay as they would if all experts were trained in one place.

The memory of a step beyond weights, gradients and moments is four buffers of one chunk: weights are updated one after
another, each gradient is freed when its weight is done, and 8-bit moments are unpacked a chunk at a time.

One of several ranks has its rows of each weight, and moments of those rows: what goes in and out here is of them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spes_p2p.config import MomentsFormat, TrainingConfig
from spes_p2p.model.transformer import to_numpy, to_torch
from spes_p2p.training.blockwise import BLOCK_VALUES, dither, num_blocks
from spes_p2p.training.moments import (
    AnyMoments,
    Buffers,
    HeldMoments,
    Moments,
    PackedMoments,
    PlainMoments,
    chunks,
    is_packed,
    load_chunk,
    pack,
    store_chunk,
    unpack,
    zero_moments,
)
from spes_p2p.training.ranks import ALONE, Ranks, global_norm

NORM_EPS = 1e-6
"""Added to the norm before it is compared with the limit, as PyTorch's own clipping does."""


@dataclass(slots=True)
class _State:
    moments: AnyMoments
    num_steps: int
    steps: Tensor
    """The same as fp32 scalar on the weight's device: PyTorch's kernel wants it so."""


class NamedAdamW:
    """AdamW keyed by the weights' names. PyTorch's fused kernel does the arithmetic, in fp32 for both formats."""

    def __init__(
        self,
        config: TrainingConfig,
        weights: Mapping[str, nn.Parameter],
        moments: MomentsFormat = "fp32",
        ranks: Ranks = ALONE,
        rate_ratios: Mapping[str, float] | None = None,
    ) -> None:
        """`rate_ratios`: weights that have another learning rate than the others, in units of theirs, by name."""
        self._config = config
        self._ranks = ranks
        self._rate_ratios = dict(rate_ratios or {})
        self._format: MomentsFormat = moments
        self._weights: dict[str, nn.Parameter] = {}
        self._states: dict[str, _State] = {}
        self._buffers: dict[torch.device, Buffers] = {}
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Train exactly these from now on. Weights known before keep their moments, new ones begin without, and those
        of weights that left are freed. Raises ValueError for a weight whose values do not lie in order."""
        for name, weight in weights.items():
            if not self._ranks.local(weight).is_contiguous():
                raise ValueError(f"the values of {name} do not lie in order")
        self._states = {name: state for name, state in self._states.items() if name in weights}
        self._weights = dict(weights)

    # ---------------------------------------------------------------------------------------------------------- a step

    def step(self, learning_rate: float) -> float | None:
        """Clip, update the weights and drop the gradients. Returns the gradients' norm before clipping, or None, with
        weights and moments untouched, if it is not finite."""
        gradients = [self._ranks.local(w.grad) for w in self._weights.values() if w.grad is not None]
        norm = global_norm(float(nn.utils.get_total_norm(gradients)), self._ranks)
        del gradients  # they are freed one by one
        if norm - norm != 0.0:
            self.drop_gradients()
            return None
        divisor = max((norm + NORM_EPS) / self._config.clip_norm, 1.0)
        with torch.no_grad():
            for name, weight in self._weights.items():
                rate = learning_rate * self._rate_ratios.get(name, 1.0)
                self._update(self._state(name), weight, rate, divisor)
                weight.grad = None
        return norm

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for weight in self._weights.values():
            weight.grad = None

    def _update(self, state: _State, weight: nn.Parameter, learning_rate: float, divisor: float) -> None:
        """One step of one weight, its gradient divided by `divisor`."""
        state.num_steps += 1
        state.steps += 1
        moments, values = state.moments, self._ranks.local(weight).detach().view(-1)
        gradient = None if weight.grad is None else self._ranks.local(weight.grad).reshape(-1)
        divide = None if gradient is None or divisor == 1.0 else state.steps.new_tensor(divisor)
        if gradient is not None and isinstance(moments, PlainMoments):
            self._adamw(values, gradient, moments.mean.view(-1), moments.square.view(-1), state, learning_rate, divide)
            return
        buffers = self._buffers_on(values.device)
        for chunk in chunks(values.numel(), buffers.num_values):
            size = chunk.num_values
            # zeros of a chunk, again and again, stand for a gradient that is missing
            gradient_n = buffers.zeros[:size] if gradient is None else gradient[chunk.values]
            if isinstance(moments, PlainMoments):
                mean_n, square_n = moments.mean.view(-1)[chunk.values], moments.square.view(-1)[chunk.values]
                self._adamw(values[chunk.values], gradient_n, mean_n, square_n, state, learning_rate, divide)
            else:
                mean_n, square_n = load_chunk(moments, chunk, buffers)
                self._adamw(
                    values[chunk.values], gradient_n, mean_n[:size], square_n[:size], state, learning_rate, divide
                )
                store_chunk(moments, chunk, buffers, dither(buffers.dither, state.num_steps))

    def _adamw(
        self,
        values: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        state: _State,
        learning_rate: float,
        divisor: Tensor | None,
    ) -> None:
        # What torch.optim.AdamW(fused=True) calls in the end, which cannot be given parts of a weight.
        config = self._config
        torch._fused_adamw_(
            [values],
            [gradient],
            [mean],
            [square],
            [],
            [state.steps],
            lr=learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

    # -------------------------------------------------------------------------------------------------- moments in, out

    def moments(self, names: Iterable[str] | None = None) -> dict[str, Moments]:
        """fp32 copies of the moments of these weights (default: all), of those that have any."""
        found: dict[str, Moments] = {}
        for name in self._weights if names is None else names:
            held = self.plain_moments(name)
            if held is not None:
                plain, num_steps = held
                found[name] = Moments(mean=to_numpy(plain.mean), square=to_numpy(plain.square), num_steps=num_steps)
        return found

    def plain_moments(self, name: str) -> tuple[PlainMoments, int] | None:
        """(fp32 moments of a weight, steps behind them), those themselves where they are held so; None: it has none."""
        state = self._states.get(name)
        return None if state is None else (self._in_fp32(name, state.moments), state.num_steps)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """Replace the moments of these weights. Raises ValueError for an unknown name or another shape."""
        for name, values in moments.items():
            weight = self._local(name)
            if weight is None or not weight.shape == values.mean.shape == values.square.shape:
                raise ValueError(f"no trained tensor {name} of shape {list(values.mean.shape)}")
        for name, values in moments.items():
            plain = PlainMoments(mean=to_torch(values.mean), square=to_torch(values.square))
            self._hold(name, plain, values.num_steps)

    def held_moments(self) -> dict[str, HeldMoments]:
        """All moments in the form they are held in, not copied: a step changes them."""
        return {
            name: HeldMoments(moments=state.moments, num_steps=state.num_steps) for name, state in self._states.items()
        }

    def load_held(self, held: Mapping[str, HeldMoments]) -> None:
        """Replace the moments of these weights by copies of what an optimizer of either format held. Within a format
        the bits stay. Raises ValueError for an unknown name or another size."""
        for name, values in held.items():
            weight = self._local(name)
            if weight is None or not fits(values.moments, weight):
                raise ValueError(f"no trained tensor {name} of this size")
        for name, values in held.items():
            self._hold(name, values.moments, values.num_steps)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Begin again without moments for these weights (default: all)."""
        for name in list(self._weights if names is None else names):
            self._states.pop(name, None)

    def state_tensors(self) -> list[Tensor]:
        """The moment tensors held, for counting memory."""
        return [tensor for state in self._states.values() for tensor in state.moments.tensors().values()]

    def _hold(self, name: str, moments: AnyMoments, num_steps: int) -> None:
        """Keep a copy of these moments in this optimizer's format."""
        weight = self._values(name)
        packed = is_packed(weight.numel(), self._format)
        if packed and isinstance(moments, PlainMoments):
            moments = pack(moments, weight, self._buffers_on(weight.device))
        elif not packed and isinstance(moments, PackedMoments):
            moments = self._in_fp32(name, moments)
        else:
            copies = {kind: tensor.to(weight.device, copy=True) for kind, tensor in moments.tensors().items()}
            moments = type(moments)(**copies)
        self._states[name] = self._with_steps(moments, num_steps, weight)

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            weight = self._values(name)
            state = self._states[name] = self._with_steps(zero_moments(weight, self._format), 0, weight)
        return state

    def _with_steps(self, moments: AnyMoments, num_steps: int, weight: Tensor) -> _State:
        steps = torch.tensor(float(num_steps), dtype=torch.float32, device=weight.device)
        return _State(moments=moments, num_steps=num_steps, steps=steps)

    def _in_fp32(self, name: str, moments: AnyMoments) -> PlainMoments:
        if isinstance(moments, PlainMoments):
            return moments
        weight = self._values(name)
        device = weight.device
        here = PackedMoments(**{kind: tensor.to(device) for kind, tensor in moments.tensors().items()})
        return unpack(here, weight, self._buffers_on(device))

    def _local(self, name: str) -> Tensor | None:
        weight = self._weights.get(name)
        return None if weight is None else self._ranks.local(weight).detach()

    def _values(self, name: str) -> Tensor:
        return self._ranks.local(self._weights[name]).detach()

    def _buffers_on(self, device: torch.device) -> Buffers:
        if device not in self._buffers:
            self._buffers[device] = Buffers.on(device)
        return self._buffers[device]


def fits(moments: AnyMoments, weight: Tensor) -> bool:
    """Whether moments, in either form, are those of a weight of this shape."""
    if isinstance(moments, PlainMoments):
        return moments.mean.shape == moments.square.shape == weight.shape
    blocks = num_blocks(weight.numel())
    codes, scales = (blocks * BLOCK_VALUES,), (blocks,)
    shapes = {kind: tuple(tensor.shape) for kind, tensor in moments.tensors().items()}
    return shapes == {"mean": codes, "mean_scales": scales, "square": codes, "square_scales": scales}
