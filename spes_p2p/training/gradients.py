"""The gradients of one batch, micro-batch by micro-batch.

B sequences, T tokens of a sequence, M experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.config import TrainingConfig
from spes_p2p.model.transformer import Transformer
from spes_p2p.training.losses import with_router_losses
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.ranks import ALONE, Part, Ranks, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLosses:
    """Of the whole batch, all ranks' parts together, as `losses.Losses`."""

    total: float
    cross_entropy: float

    @property
    def finite(self) -> bool:
        """Whether the gradients are worth looking at."""
        return math.isfinite(self.total)


def add_gradients(
    model: Transformer,
    tokens_BT1: Tensor,
    training: TrainingConfig,
    plan: StepPlan,
    count_scale_M: Tensor | None,
    ranks: Ranks = ALONE,
) -> BatchLosses:
    """Add the gradients of a batch's loss to the model's weights; there should be none before.

    Each micro-batch's loss is its part of the whole batch's, so that the sum of their gradients is the gradient of
    the mean over all tokens (`training.losses` says what that means for each term). Stops at the first micro-batch
    whose loss is not finite: the gradients are then useless. Whatever is raised on the way, memory errors among it,
    leaves gradients behind that are to be dropped.

    One of several ranks is given the whole batch as well, and computes its share; the model adds up their gradients.
    """
    total = cross_entropy = 0.0
    for part in parts(len(tokens_BT1), plan.micro_sequences, ranks):
        # on several ranks all exchange gradients, whatever their own loss is
        always = ranks.count > 1
        own = _add_part(model, tokens_BT1, part, training, plan, count_scale_M, always)
        part_total, part_cross_entropy = ranks.sum(*own)
        total, cross_entropy = total + part_total, cross_entropy + part_cross_entropy
        if not math.isfinite(total):
            break
    return BatchLosses(total=total, cross_entropy=cross_entropy)


def _add_part(
    model: Transformer,
    tokens_BT1: Tensor,
    part: Part,
    training: TrainingConfig,
    plan: StepPlan,
    count_scale_M: Tensor | None,
    always: bool,
) -> tuple[float, float]:
    """Total and cross-entropy of one micro-batch. A function of its own, so that its graph is gone when it returns."""
    part_BT1 = tokens_BT1[part.rows]
    with autocast(tokens_BT1.device):
        head, routings = model.losses(
            part_BT1[:, :-1],
            part_BT1[:, 1:],
            training.z_loss,
            batch_tokens=tokens_BT1[:, 1:].numel(),
            checkpoint_layers=plan.checkpoint,
        )
    losses = with_router_losses(head, routings, training, count_scale_M, len(part_BT1) / len(tokens_BT1))
    weighted = losses.total if part.counts else losses.total * 0
    total = weighted.item()
    if always or math.isfinite(total):
        weighted.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return total, losses.cross_entropy.item() if part.counts else 0.0


def autocast(device: torch.device) -> torch.autocast:
    """Products in bf16 on a GPU. On a CPU everything stays fp32: many compute bf16 a hundred times slower."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
