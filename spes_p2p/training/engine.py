"""What computes: a model and its optimizer, on one device. `training.spread` has the same on several.

The trainer says what is to be done; where weights, gradients and moments lie is this side's business.

B sequences, T tokens of a sequence, M experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spes_p2p.config import FrozenFormat, MomentsFormat, RunConfig
from spes_p2p.model.transformer import Transformer, to_numpy
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.gradients import BatchLosses, add_gradients, autocast
from spes_p2p.training.moments import HeldMoments, Moments
from spes_p2p.training.optim import NamedAdamW
from spes_p2p.training.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of an engine's state, of which the values come when they are asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]
    """In host memory, a view where they are there already: to be used before the next step."""


class Engine:
    """A model and its optimizer on one device."""

    num_ranks = 1

    def __init__(
        self,
        config: RunConfig,
        *,
        device: str = "cpu",
        frozen_format: FrozenFormat = "fp32",
        moments: MomentsFormat = "fp32",
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self._model = Transformer.build(config.model, frozen_format, device)
        psi = self._model.psi()
        ratios = dict.fromkeys(psi, config.training.psi_lr_ratio)
        self._optimizer = NamedAdamW(config.training, psi, moments, rate_ratios=ratios)

    @property
    def model(self) -> Transformer:
        """What this process holds of the model: all of it."""
        return self._model

    @property
    def optimizer(self) -> NamedAdamW:
        """What this process holds of the optimizer: all of it."""
        return self._optimizer

    # ---------------------------------------------------------------------------------------------------------- weights

    def set_owned(self, experts: Collection[int]) -> None:
        """Train psi and exactly these experts. Experts owned before and after keep weights and moments; every other
        weight is to be loaded then. Raises ValueError for an expert that the model lacks."""
        self.model.set_owned(experts)
        self.optimizer.set_weights(self.model.psi() | self.model.owned())

    def load(self, tensors: Mapping[str, F32]) -> None:
        """Set weights by name, frozen ones among them. Raises ValueError for an unknown name or another shape, before
        anything is written."""
        self.model.load(tensors)

    def weights(self, names: Iterable[str] | None = None) -> Tensors:
        """fp32 copies of trained weights (default: all)."""
        trained = self.model.psi() | self.model.owned()
        return {name: to_numpy(trained[name]) for name in (trained if names is None else names)}

    def host_weight(self, name: str) -> F32:
        """A trained weight in host memory, fp32: a view where it is there already, to be used before the next step."""
        weight: F32 = self.model.get_parameter(name).detach().cpu().numpy()
        return weight

    def weights_are_finite(self) -> bool:
        """Whether no trained weight is NaN or infinite."""
        trained = self.model.psi() | self.model.owned()
        # the least and the largest value, which are NaN if any value is, in one pass
        return all(bool(torch.isfinite(torch.stack(weight.aminmax())).all()) for weight in trained.values())

    # -------------------------------------------------------------------------------------------------------- computing

    def add_gradients(self, tokens_BT1: Tensor, plan: StepPlan, count_scale_M: Tensor | None) -> BatchLosses:
        """See `gradients.add_gradients`."""
        return add_gradients(self.model, tokens_BT1, self.config.training, plan, count_scale_M)

    def step(self, learning_rate: float) -> float | None:
        """See `NamedAdamW.step`."""
        return self.optimizer.step(learning_rate)

    def drop_gradients(self) -> None:
        """Free all gradients."""
        self.optimizer.drop_gradients()

    def nats(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of each target, [B, T], in nats."""
        with autocast(self.device):
            return self.model.nats(tokens_BT, targets_BT)

    # ---------------------------------------------------------------------------------------------------------- moments

    def moments(self, names: Iterable[str]) -> dict[str, Moments]:
        """fp32 copies of the moments of these weights, of those that have any."""
        return self.optimizer.moments(names)

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """Replace the moments of these weights. Raises ValueError for an unknown name or another shape."""
        self.optimizer.load_moments(moments)

    def num_steps(self) -> dict[str, int]:
        """Optimizer steps behind the moments of each weight that has any."""
        return {name: held.num_steps for name, held in self.optimizer.held_moments().items()}

    def state(self) -> dict[str, StateTensor]:
        """What would be lost with the engine: `weight/NAME` of all trained weights, and the tensors of moments in the
        form they are held in (`mean/NAME` and so on, see `moments`)."""
        trained = self.model.psi() | self.model.owned()
        tensors = {f"weight/{name}": weight.detach() for name, weight in trained.items()}
        for name, held in self.optimizer.held_moments().items():
            tensors |= {f"{kind}/{name}": tensor for kind, tensor in held.moments.tensors().items()}
        return {name: _on_host(tensor) for name, tensor in tensors.items()}

    def load_held(self, held: Mapping[str, HeldMoments]) -> None:
        """Replace the moments of these weights by copies of what an engine of any kind and format held. Raises
        ValueError for an unknown name or another size."""
        self.optimizer.load_held(held)

    def forget_moments(self) -> None:
        """Begin again without moments."""
        self.optimizer.forget()


def _on_host(tensor: Tensor) -> StateTensor:
    def read() -> npt.NDArray[Any]:
        return np.ascontiguousarray(tensor.cpu().numpy())

    return StateTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=read)
