"""Mixture of experts, of which this peer owns some and keeps the others frozen.

T tokens, D width, M experts, K experts per token.

An owned expert is three fp32 parameters. A frozen one is three constants in a storage format: it takes part in the
forward pass and passes gradients to its input, and no gradient of its weights ever exists. A layer's experts are one
autograd function, whose backward pass reads the stored weights again instead of keeping a decoded copy alive.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spes_p2p.config import FrozenFormat, ModelConfig
from spes_p2p.model import expert_grouped
from spes_p2p.model.expert_grouped import grouped_experts
from spes_p2p.model.expert_loop import looped_experts
from spes_p2p.model.experts import Expert, FrozenExpert, OwnedExpert
from spes_p2p.model.shards import MATRICES
from spes_p2p.model.slots import BankCall, compute_dtype, sort_slots


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


class ExpertBank(nn.ModuleDict):
    """All experts of one layer by index, owned or frozen. An expert without tokens costs nothing."""

    def __init__(self, config: ModelConfig, frozen_format: FrozenFormat) -> None:
        super().__init__({str(j): FrozenExpert(config, frozen_format) for j in range(config.num_experts)})
        self._config = config
        self._frozen_format: FrozenFormat = frozen_format
        self.complete_gradients = False
        """See `BankCall.complete`."""

    def set_owned(self, owned: Collection[int]) -> None:
        """Make exactly these experts trainable. Parameters that stay owned keep their identity; an expert that
        changes sides keeps its values, as far as the storage format of frozen ones can hold them."""
        for key, expert in self._experts().items():
            if isinstance(expert, OwnedExpert) == (int(key) in owned):
                continue
            values = {matrix: expert.decoded(matrix) for matrix in MATRICES}
            new = OwnedExpert(self._config) if int(key) in owned else FrozenExpert(self._config, self._frozen_format)
            new = new.to(values[MATRICES[0]].device)
            for matrix in MATRICES:
                new.store_(matrix, values[matrix])
            self[key] = new

    def expert(self, index: int) -> Expert:
        """One expert. Raises KeyError for an index the layer lacks."""
        return self._experts()[str(index)]

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """[T, D] -> [T, D], in the type of `x`: the weighted sum of each token's K experts."""
        experts = list(self._experts().values())
        call = BankCall(
            experts=experts,
            slots=sort_slots(routing.experts_TK, routing.counts_M),
            dtype=compute_dtype(x_TD),
            keep=torch.is_grad_enabled(),
            complete=self.complete_gradients,
        )
        grouped = expert_grouped.takes(x_TD, call.dtype, self._config.width, self._config.expert_width)
        compute = grouped_experts if grouped else looped_experts
        return compute(call, x_TD, routing.weights_TK)

    def _experts(self) -> dict[str, Expert]:
        return cast(dict[str, Expert], dict(self.items()))
