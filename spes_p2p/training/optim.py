"""AdamW over named weights, whose moments outlive the rounds and can be handed over with a shard.

Decoupled weight decay on everything (Loshchilov and Hutter, arXiv 1711.05101). Gradients are clipped to a global norm
over all of the peer's trainables. A weight without a gradient in a step (an expert no token went to) is treated as
one with a zero gradient, so that its moments decay as they would if all experts were trained in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spes_p2p.config import TrainingConfig
from spes_p2p.model.transformer import to_numpy, to_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What AdamW remembers of one weight: running means of gradient and squared gradient, and how many steps."""

    mean: npt.NDArray[np.float32]
    square: npt.NDArray[np.float32]
    num_steps: int


class NamedAdamW:
    """AdamW keyed by the weights' names. PyTorch's fused kernel does the arithmetic."""

    def __init__(self, config: TrainingConfig, weights: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self._weights: dict[str, nn.Parameter] = {}
        self._adamw = self._make({})
        self.set_weights(weights)

    def set_weights(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Train exactly these from now on. Weights known before keep their moments, new ones begin without, and those
        of weights that left are freed."""
        kept = {
            name: self._adamw.state[self._weights[name]]
            for name in weights
            if name in self._weights and self._adamw.state.get(self._weights[name])
        }
        self._weights = dict(weights)
        self._adamw = self._make(self._weights)
        for name, state in kept.items():
            self._adamw.state[self._weights[name]] = state

    def step(self, learning_rate: float) -> float | None:
        """Clip, update the weights and drop the gradients. Returns the gradients' norm before clipping, or None, with
        weights and moments untouched, if it is not finite."""
        for weight in self._weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.clip_norm))
        if finite := (norm - norm == 0.0):
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
        self.drop_gradients()
        return norm if finite else None

    def drop_gradients(self) -> None:
        """Free all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def moments(self, names: Iterable[str] | None = None) -> dict[str, Moments]:
        """Copies of the moments of these weights (default: all), of those that have any."""
        found: dict[str, Moments] = {}
        for name in self._weights if names is None else names:
            state = self._adamw.state.get(self._weights[name])
            if state:
                found[name] = Moments(
                    mean=to_numpy(state["exp_avg"]),
                    square=to_numpy(state["exp_avg_sq"]),
                    num_steps=int(state["step"].item()),
                )
        return found

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """Replace the moments of these weights. Raises ValueError for an unknown name or another shape."""
        for name, values in moments.items():
            weight = self._weights.get(name)
            if weight is None or not weight.shape == values.mean.shape == values.square.shape:
                raise ValueError(f"no trained tensor {name} of shape {list(values.mean.shape)}")
        for name, values in moments.items():
            weight = self._weights[name]
            self._adamw.state[weight] = {
                "step": torch.tensor(float(values.num_steps), dtype=torch.float32, device=weight.device),
                "exp_avg": to_torch(values.mean).to(weight.device, copy=True),
                "exp_avg_sq": to_torch(values.square).to(weight.device, copy=True),
            }

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Begin again without moments for these weights (default: all)."""
        for name in list(self._weights if names is None else names):
            self._adamw.state.pop(self._weights[name], None)

    def state_tensors(self) -> list[Tensor]:
        """The moment tensors held, for counting memory."""
        return [state[key] for state in self._adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]

    def _make(self, weights: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
        config = self._config
        groups = [{"params": list(weights.values())}]
        return torch.optim.AdamW(
            groups,
            lr=config.peak_lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
