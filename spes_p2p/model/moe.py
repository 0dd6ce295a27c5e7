"""Mixture of experts, of which this peer owns some and keeps the others frozen.

T tokens, D width, F expert width, M experts, K experts per token, S slots of one expert (S summed over M is T*K).

An owned expert is three fp32 parameters. A frozen one is three buffers in a storage format: it takes part in the
forward pass and passes gradients to its input, and no gradient of its weights ever exists. Its backward pass reads
the stored weights again instead of keeping a decoded copy alive.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.config import ModelConfig
from spes_p2p.model.shards import expert_shapes

FrozenFormat = Literal["fp32", "bf16"]
STORAGE_DTYPES: dict[FrozenFormat, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Routing(NamedTuple):
    """Where the tokens of one layer go, and what the losses need to know of it."""

    logits_TM: Tensor
    probs_TM: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    counts_M: Tensor
    """Slots of each expert (int64)."""


class Router(nn.Module):
    """Softmax over all experts in fp32, then the K most probable."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.top_k = config.top_k
        self.normalise = config.norm_topk_prob

    def forward(self, x_TD: Tensor) -> Routing:
        """Route tokens. With `norm_topk_prob` the K weights of a token add up to one."""
        logits_TM = F.linear(x_TD.float(), self.router.weight)
        probs_TM = logits_TM.softmax(dim=-1)
        weights_TK, experts_TK = probs_TM.topk(self.top_k, dim=-1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        counts_M = torch.bincount(experts_TK.flatten(), minlength=logits_TM.shape[-1])
        return Routing(logits_TM, probs_TM, weights_TK, experts_TK, counts_M)


class OwnedExpert(nn.Module):
    """A trained SwiGLU expert: fp32 parameters gate, up [F, D] and down [D, F]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shapes = expert_shapes(config)
        self.gate = nn.Parameter(torch.zeros(shapes["gate"]))
        self.up = nn.Parameter(torch.zeros(shapes["up"]))
        self.down = nn.Parameter(torch.zeros(shapes["down"]))

    def forward(self, x_SD: Tensor) -> Tensor:
        """[S, D] -> [S, D]: (silu(x gate^T) * (x up^T)) down^T."""
        return F.linear(F.silu(F.linear(x_SD, self.gate)) * F.linear(x_SD, self.up), self.down)


class FrozenExpert(nn.Module):
    """A SwiGLU expert that somebody else trains: buffers of the same names and shapes, in a storage format."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat) -> None:
        super().__init__()
        for matrix, shape in expert_shapes(config).items():
            self.register_buffer(matrix, torch.zeros(shape, dtype=STORAGE_DTYPES[frozen_format]))

    def forward(self, x_SD: Tensor) -> Tensor:
        """[S, D] -> [S, D], as `OwnedExpert`, computed in the type of `x`."""
        y_SD: Tensor = _FrozenSwiGLU.apply(x_SD, self.gate, self.up, self.down)  # type: ignore[no-untyped-call]  # untyped in torch
        return y_SD


class _FrozenSwiGLU(torch.autograd.Function):
    """SwiGLU whose weights are constants: keeps the two pre-activations, gives the gradient of the input alone."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
        gate_SF = x_SD @ gate_FD.to(x_SD.dtype).T
        up_SF = x_SD @ up_FD.to(x_SD.dtype).T
        ctx.save_for_backward(gate_SF, up_SF, gate_FD, up_FD, down_DF)
        return F.silu(gate_SF).mul_(up_SF) @ down_DF.to(x_SD.dtype).T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gate_SF, up_SF, gate_FD, up_FD, down_DF = ctx.saved_tensors
        grad_hidden_SF = grads[0] @ down_DF.to(gate_SF.dtype)
        sigmoid_SF = gate_SF.sigmoid()
        # d silu(g) / dg = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
        slope_SF = (1 - sigmoid_SF).mul_(gate_SF).add_(1).mul_(sigmoid_SF)
        grad_gate_SF = slope_SF.mul_(up_SF).mul_(grad_hidden_SF)
        grad_up_SF = sigmoid_SF.mul_(gate_SF).mul_(grad_hidden_SF)
        grad_x_SD = grad_gate_SF @ gate_FD.to(gate_SF.dtype)
        grad_x_SD += grad_up_SF @ up_FD.to(gate_SF.dtype)
        return grad_x_SD, None, None, None


class _ToSlots(torch.autograd.Function):
    """Copy each token into its K slots, sorted by expert. The gradient is gathered and added in a fixed order, where
    an index_add would add in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return x_TD[order // place_TK.shape[1]]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return grads[0][place_TK].sum(dim=1), None, None


class _FromSlots(torch.autograd.Function):
    """Bring slots back into token order, [T, K, D]: a permutation, whose gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, y_slots: Tensor, order: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y_slots[place_TK]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].flatten(0, 1)[order], None, None


class ExpertBank(nn.ModuleDict):
    """All experts of one layer by index, owned or frozen. An expert without tokens costs nothing."""

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat) -> None:
        super().__init__({str(j): FrozenExpert(config, frozen_format) for j in range(config.num_experts)})
        self._config = config
        self._frozen_format: FrozenFormat = frozen_format

    def set_owned(self, owned: Collection[int]) -> None:
        """Make exactly these experts trainable. Parameters that stay owned keep their identity; an expert that
        changes sides keeps its values, as far as the storage format of frozen ones can hold them."""
        for key, expert in list(self.items()):
            if isinstance(expert, OwnedExpert) == (int(key) in owned):
                continue
            new = OwnedExpert(self._config) if int(key) in owned else FrozenExpert(self._config, self._frozen_format)
            old_tensors = dict(expert.named_parameters()) | dict(expert.named_buffers())
            new = new.to(old_tensors["gate"].device)
            new_tensors = dict(new.named_parameters()) | dict(new.named_buffers())
            with torch.no_grad():
                for matrix, tensor in new_tensors.items():
                    tensor.copy_(old_tensors[matrix])
            self[key] = new

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """[T, D] -> [T, D]: the weighted sum of each token's K experts."""
        order = routing.experts_TK.flatten().argsort(stable=True)
        place_TK = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        place_TK = place_TK.view_as(routing.experts_TK)
        slots: Tensor = _ToSlots.apply(x_TD, order, place_TK)  # type: ignore[no-untyped-call]  # untyped in torch
        sizes = routing.counts_M.tolist()
        outputs = [self[str(j)](x_SD) for j, x_SD in enumerate(torch.split(slots, sizes)) if sizes[j]]
        y_TKD: Tensor = _FromSlots.apply(torch.cat(outputs), order, place_TK)  # type: ignore[no-untyped-call]  # untyped in torch
        return (y_TKD * routing.weights_TK.unsqueeze(-1).to(y_TKD.dtype)).sum(dim=1)
