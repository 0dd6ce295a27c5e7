"""A layer's experts one after another: the way for CPUs, and for whatever `expert_grouped` does not take.

    y_t = sum over the slots of t of  ((w * silu(g) * u) down^T)   with g = x gate^T, u = x up^T

Kept for backward: x, the two pre-activations g and u of each slot, and the routing. Everything else is made again: the
hidden values from g and u, x of a slot from x, frozen weights from their storage. The routing weight goes into the
hidden values, before the last product, so that the experts' outputs need not be kept for its gradient.

All products are written into buffers of one expert's size, which stay in the processor's cache; fresh memory for every
intermediate result costs more than the arithmetic on it (docs/LOG.md). Sums over slots run in the order of the experts'
indices, and no token occurs twice in one expert: the same bits every time, on GPUs too.

T tokens, D width, F expert width, S slots, N slots of one expert, P the same padded (`products.padded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spes_p2p.model.experts import OwnedExpert
from spes_p2p.model.products import add_product_, padded, product
from spes_p2p.model.slots import BankCall, Way


def _forward(ctx: Any, call: BankCall, x_TD: Tensor, weights_TK: Tensor, owned: tuple[Tensor, ...]) -> Tensor:
    slots, tokens = call.slots, call.slots.tokens
    inputs_TD = x_TD.to(call.dtype)
    most = padded(max(call.slots.sizes), inputs_TD)
    width, inner = _widths(call)
    num_kept = len(slots.order) if call.keep else most
    gates, ups = (inputs_TD.new_empty(num_kept, inner) for _ in range(2))
    weights_S1 = weights_TK.flatten()[slots.order].to(call.dtype).unsqueeze(1)
    weight = inputs_TD.new_empty(width * inner)
    outer_ND, inner_NF = inputs_TD.new_empty(most, width), inputs_TD.new_empty(most, inner)
    y_TD = torch.zeros_like(x_TD)
    for _, expert, rows in call.busy():
        size = rows.stop - rows.start
        kept = rows if call.keep else slice(size)
        x_PD, x_ND = _padded_rows(outer_ND, size)
        torch.index_select(inputs_TD, 0, tokens[rows], out=x_ND)
        gate_NF = product(x_PD, expert.dense("gate", weight).T, out=gates[kept])
        up_NF = product(x_PD, expert.dense("up", weight).T, out=ups[kept])
        hidden_PF, hidden_NF = _padded_rows(inner_NF, size)
        torch.ops.aten.silu.out(gate_NF, out=hidden_NF)
        hidden_NF.mul_(up_NF).mul_(weights_S1[rows])
        y_ND = product(hidden_PF, expert.dense("down", weight).T, out=x_ND)
        y_TD.index_add_(0, tokens[rows], y_ND.to(y_TD.dtype))
    if call.keep:
        ctx.call, ctx.x_dtype = call, x_TD.dtype
        ctx.save_for_backward(inputs_TD, gates, ups, weights_TK, *owned)
    return y_TD


def _backward(ctx: Any, call: BankCall, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    inputs_TD, gates, ups, weights_TK, *_ = ctx.saved_tensors
    slots, tokens, most = call.slots, call.slots.tokens, padded(max(call.slots.sizes), grad_TD)
    width, inner = _widths(call)
    weights_S1 = weights_TK.flatten()[slots.order].to(call.dtype).unsqueeze(1)
    weight = grad_TD.new_empty(width * inner)
    first_ND, second_ND = (grad_TD.new_empty(most, width) for _ in range(2))
    first_NF, second_NF, third_NF = (grad_TD.new_empty(most, inner) for _ in range(3))
    grad_x_TD = torch.zeros_like(inputs_TD, dtype=ctx.x_dtype)
    grad_weights_S = grad_TD.new_empty(len(slots.order))
    found: dict[tuple[int, str], Tensor] = {}
    for index, expert, rows in call.busy():
        size, owned = rows.stop - rows.start, isinstance(expert, OwnedExpert)
        gate_NF, up_NF, weights_N1 = gates[rows], ups[rows], weights_S1[rows]
        grad_y_PD, grad_y_ND = _padded_rows(first_ND, size)
        torch.index_select(grad_TD, 0, tokens[rows], out=grad_y_ND)
        grad_NF = product(grad_y_PD, expert.dense("down", weight), out=first_NF[:size])
        silu_PF, silu_NF = _padded_rows(second_NF, size)
        torch.ops.aten.silu.out(gate_NF, out=silu_NF)
        third_PF, third = _padded_rows(third_NF, size)
        hidden_NF = torch.mul(silu_NF, up_NF, out=third)
        torch.sum(grad_NF * hidden_NF, dim=1, out=grad_weights_S[rows])
        if owned:
            hidden_NF.mul_(weights_N1)
            found[index, "down"] = product(grad_y_PD.T, third_PF)
        grad_NF.mul_(weights_N1)
        silu_NF.mul_(grad_NF)
        grad_NF.mul_(up_NF)
        torch.ops.aten.silu_backward.grad_input(grad_NF, gate_NF, grad_input=third)
        grad_gate_PF, grad_up_PF = third_PF, silu_PF
        grad_x_PD = product(grad_gate_PF, expert.dense("gate", weight), out=grad_y_PD)
        add_product_(grad_x_PD, grad_up_PF, expert.dense("up", weight))
        grad_x_TD.index_add_(0, tokens[rows], grad_x_PD[:size].to(grad_x_TD.dtype))
        if owned:
            x_PD, x_ND = _padded_rows(second_ND, size)
            torch.index_select(inputs_TD, 0, tokens[rows], out=x_ND)
            found[index, "gate"] = product(grad_gate_PF.T, x_PD)
            found[index, "up"] = product(grad_up_PF.T, x_PD)
    grad_weights_TK = torch.empty_like(weights_TK)
    grad_weights_TK.view(-1)[slots.order] = grad_weights_S.to(weights_TK.dtype)
    return grad_x_TD, grad_weights_TK, *call.gradients(found)


def _padded_rows(buffer: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first rows of a buffer as products take them, zeros after the first `size`, and these alone."""
    rows = buffer[: padded(size, buffer)]
    rows[size:].zero_()
    return rows, rows[:size]


def _widths(call: BankCall) -> tuple[int, int]:
    """(D, F)."""
    rows, columns = call.experts[0].shape("down")
    return rows, columns


looped_experts = Way(forward=_forward, backward=_backward)
