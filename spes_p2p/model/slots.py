"""Slots: the places of one layer's tokens, sorted by expert. What both ways to compute a layer's experts need to know.

T tokens, K experts per token, S = T * K slots, N slots of one expert, D width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.model.experts import Expert, OwnedExpert
from spes_p2p.model.shards import MATRICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Which token goes to which expert."""

    order: Tensor
    """[S]: the place in a flat [T, K] of each slot, by expert and then by token."""
    sizes: tuple[int, ...]
    """Slots of each expert."""
    per_token: int
    """K."""

    @property
    def tokens(self) -> Tensor:
        """[S]: the token of each slot."""
        return self.order // self.per_token

    def places_TK(self) -> Tensor:
        """The slot of each token's k-th expert: the inverse of `order`."""
        places = torch.empty_like(self.order)
        places.scatter_(0, self.order, torch.arange(len(self.order), device=self.order.device))
        return places.view(-1, self.per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class BankCall:
    """One computation of a layer's experts: on which slots, and how."""

    experts: Sequence[Expert]
    slots: Slots
    dtype: torch.dtype
    """Type of products and of what is kept for backward."""
    keep: bool
    """Whether a backward pass will follow."""
    complete: bool = False
    """Whether experts without tokens get gradients of zeros instead of none."""

    def busy(self) -> Iterator[tuple[int, Expert, slice]]:
        """(index, expert, its slots) of every expert that has any, in the order of their indices."""
        begin = 0
        for index, (expert, size) in enumerate(zip(self.experts, self.slots.sizes, strict=True)):
            if size:
                yield index, expert, slice(begin, begin + size)
            begin += size

    def owned_weights(self) -> list[nn.Parameter]:
        """The parameters of all owned experts, by index and then in the order of `MATRICES`: those that the autograd
        functions take as inputs and give gradients for."""
        return [
            expert.get_parameter(matrix)
            for expert in self.experts
            if isinstance(expert, OwnedExpert)
            for matrix in MATRICES
        ]

    def gradients(self, found: dict[tuple[int, str], Tensor]) -> list[Tensor | None]:
        """Gradients by (index, matrix) in the order of `owned_weights` and in their type, contiguous and not views
        (so that autograd takes them over without a copy). None for an expert without tokens, unless `complete`."""
        owned = (index for index, expert in enumerate(self.experts) if isinstance(expert, OwnedExpert))
        names = [(index, matrix) for index in owned for matrix in MATRICES]
        grads: list[Tensor | None] = []
        for name, weight in zip(names, self.owned_weights(), strict=True):
            grad = found.pop(name, None)
            if grad is not None:
                grad = grad.to(weight.dtype, copy=grad._base is not None)
            elif self.complete:
                grad = torch.zeros_like(weight)
            grads.append(grad)
        return grads


def sort_slots(experts_TK: Tensor, counts_M: Tensor) -> Slots:
    """The slots of a routing. Waits for the device: the host must know the sizes."""
    order = experts_TK.flatten().argsort(stable=True)
    return Slots(order=order, sizes=tuple(counts_M.tolist()), per_token=experts_TK.shape[1])


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that autocast asks for, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compute a layer's experts: its two passes. `forward` keeps in `ctx` what `backward` needs, the call
    among it, if a backward pass will follow; `backward` gives the gradients of x, the routing weights and
    `owned_weights`."""

    forward: Callable[[Any, BankCall, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
    backward: Callable[[Any, BankCall, Tensor], tuple[Tensor | None, ...]]

    def __call__(self, call: BankCall, x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, D] -> [T, D], in the type of `x`, with gradients for `x`, the routing weights and the owned experts."""
        y_TD: Tensor = _Experts.apply(self, call, x_TD, weights_TK, *call.owned_weights())  # type: ignore[no-untyped-call]  # untyped in torch
        return y_TD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, call: BankCall, x_TD: Tensor, weights_TK: Tensor, *owned: Tensor) -> Tensor:
        ctx.way = way
        with torch.autocast(x_TD.device.type, enabled=False):
            return way.forward(ctx, call, x_TD, weights_TK, owned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.way.backward(ctx, ctx.call, grads[0].to(ctx.call.dtype).contiguous())
