"""A layer's experts together, by `torch.nn.functional.grouped_mm`: for GPUs, where one launch per expert is slow.

The same function as `expert_loop`, and the same is kept for backward. The weights of the experts that have tokens are
decoded into one buffer of bounded size, some experts at a time, since grouped_mm wants them stacked. Sums over slots
are gathers in token order followed by a sum over K: no atomics, the same bits every time.

grouped_mm wants contiguous operands (or transposed ones), and rows that begin at multiples of 16 bytes.

T tokens, K experts per token, D width, F expert width, S slots, G experts of a group, N slots of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.model.experts import Expert, OwnedExpert
from spes_p2p.model.slots import BankCall, Way

STACK_BYTES = 256 << 20
"""Most memory for decoded weights, but at least one expert's matrix."""
ALIGN_BYTES = 16
MIN_CAPABILITY = (8, 0)
"""First generation of NVIDIA GPUs with the kernel."""


def takes(x: Tensor, dtype: torch.dtype, width: int, expert_width: int) -> bool:
    """Whether the kernel can do it: bf16 on a GPU of the right generation, with aligned rows."""
    return (
        x.is_cuda
        and dtype == torch.bfloat16
        and not (2 * width % ALIGN_BYTES or 2 * expert_width % ALIGN_BYTES)
        and _capability(x.device) >= MIN_CAPABILITY
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Experts with tokens whose stacked matrices are made at once."""

    members: list[tuple[int, Expert, slice]]
    rows: slice
    """All their slots."""
    ends_G: Tensor
    """Where each one's slots end, from the group's beginning (int32)."""


def _group(members: list[tuple[int, Expert, slice]], device: torch.device) -> _Group:
    begin = members[0][2].start
    ends = torch.tensor([rows.stop - begin for _, _, rows in members], dtype=torch.int32)
    return _Group(members=members, rows=slice(begin, members[-1][2].stop), ends_G=ends.to(device, non_blocking=True))


class _Stacks:
    """The groups of a layer and the buffer for their decoded weights."""

    def __init__(self, call: BankCall, like: Tensor) -> None:
        rows, columns = call.experts[0].shape("down")
        busy = list(call.busy())
        size = max(1, min(len(busy), STACK_BYTES // (rows * columns * like.element_size())))
        self.groups = [_group(busy[at : at + size], like.device) for at in range(0, len(busy), size)]
        self._buffer = like.new_empty(min(size, len(busy)), rows * columns)

    def weights(self, group: _Group, matrix: str) -> Tensor:
        """[G, rows, columns] of a matrix of the group's experts, valid until the next call."""
        shape = group.members[0][1].shape(matrix)
        for place, (_, expert, _) in zip(self._buffer, group.members, strict=False):
            expert.decode_(matrix, place.view(shape))
        return self._buffer[: len(group.members)].view(-1, *shape)


def _forward(ctx: Any, call: BankCall, x_TD: Tensor, weights_TK: Tensor, owned: tuple[Tensor, ...]) -> Tensor:
    slots = call.slots
    inputs_TD = x_TD.to(call.dtype)
    x_SD = inputs_TD[slots.tokens]
    stacks = _Stacks(call, x_SD)
    inner = call.experts[0].shape("gate")[0]
    gates, ups = (x_SD.new_empty(len(x_SD), inner) for _ in range(2))
    y_SD = torch.empty_like(x_SD)
    weights_S1 = weights_TK.flatten()[slots.order].to(call.dtype).unsqueeze(1)
    for group in stacks.groups:
        rows = group.rows
        for matrix, products in (("gate", gates), ("up", ups)):
            weights_GDF = stacks.weights(group, matrix).transpose(-2, -1)
            products[rows] = F.grouped_mm(x_SD[rows], weights_GDF, offs=group.ends_G)
        hidden_NF = F.silu(gates[rows]).mul_(ups[rows]).mul_(weights_S1[rows])
        weights_GFD = stacks.weights(group, "down").transpose(-2, -1)
        y_SD[rows] = F.grouped_mm(hidden_NF, weights_GFD, offs=group.ends_G)
    if call.keep:
        ctx.call, ctx.x_dtype = call, x_TD.dtype
        ctx.save_for_backward(inputs_TD, gates, ups, weights_TK, *owned)
    return y_SD[slots.places_TK()].sum(dim=1, dtype=x_TD.dtype)


def _backward(ctx: Any, call: BankCall, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    inputs_TD, gates, ups, weights_TK, *_ = ctx.saved_tensors
    slots = call.slots
    grad_y_SD, x_SD = grad_TD[slots.tokens], inputs_TD[slots.tokens]
    stacks = _Stacks(call, x_SD)
    weights_S1 = weights_TK.flatten()[slots.order].to(call.dtype).unsqueeze(1)
    grad_x_SD = torch.empty_like(x_SD)
    grad_weights_S = grad_TD.new_empty(len(slots.order), dtype=torch.float32)
    found: dict[tuple[int, str], Tensor] = {}
    for group in stacks.groups:
        rows = group.rows
        grad_NF = F.grouped_mm(grad_y_SD[rows], stacks.weights(group, "down"), offs=group.ends_G)
        silu_NF = F.silu(gates[rows])
        hidden_NF = silu_NF * ups[rows]
        torch.sum(grad_NF * hidden_NF, dim=1, dtype=torch.float32, out=grad_weights_S[rows])
        hidden_NF.mul_(weights_S1[rows])
        grad_NF.mul_(weights_S1[rows])
        grad_up_NF = silu_NF.mul_(grad_NF)
        grad_gate_NF = torch.ops.aten.silu_backward(grad_NF.mul_(ups[rows]), gates[rows])
        grad_x_ND = F.grouped_mm(grad_gate_NF, stacks.weights(group, "gate"), offs=group.ends_G)
        grad_x_ND += F.grouped_mm(grad_up_NF, stacks.weights(group, "up"), offs=group.ends_G)
        grad_x_SD[rows] = grad_x_ND
        for run in _owned_runs(group):
            inside = slice(run.rows.start - rows.start, run.rows.stop - rows.start)
            for matrix, grad_rows, input_rows in (
                ("gate", grad_gate_NF[inside], x_SD[run.rows]),
                ("up", grad_up_NF[inside], x_SD[run.rows]),
                ("down", grad_y_SD[run.rows], hidden_NF[inside]),
            ):
                products = F.grouped_mm(grad_rows.T, input_rows, offs=run.ends_G)
                found |= {(index, matrix): grad for (index, _, _), grad in zip(run.members, products, strict=True)}
    grad_x_TD = grad_x_SD[slots.places_TK()].sum(dim=1, dtype=ctx.x_dtype)
    grad_weights_TK = torch.empty_like(weights_TK)
    grad_weights_TK.view(-1)[slots.order] = grad_weights_S.to(weights_TK.dtype)
    return grad_x_TD, grad_weights_TK, *call.gradients(found)


def _owned_runs(group: _Group) -> Iterator[_Group]:
    """The longest runs of owned experts among a group's: their slots lie together, without a copy."""
    for is_owned, run in groupby(group.members, key=lambda member: isinstance(member[1], OwnedExpert)):
        if is_owned:
            yield _group(list(run), group.ends_G.device)


grouped_experts = Way(forward=_forward, backward=_backward)
