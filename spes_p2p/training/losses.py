"""The loss of one batch: cross-entropy, and three small terms that keep logits and routing in bounds.

    L = CE + z_loss * mean(logsumexp(logits)^2)
           + balance_loss * (1/L) * sum_l M * sum_j f_lj * P_lj
           + router_z_loss * sum_l mean(logsumexp(router_logits)^2)

f is an expert's share of the routed slots (a count, no gradient), P its mean router probability; at perfect balance
the balance sum is 1. Sources: Switch Transformer (arXiv 2101.03961) for the balance, ST-MoE (arXiv 2202.08906) for
the router's z-loss, PaLM (arXiv 2204.02311) for the output's.

Over a batch in micro-batches: cross-entropy, z-loss and router z-loss are token means over the whole batch, exactly.
The balance is a product of two means, so it is taken in each micro-batch by itself and averaged, weighted by tokens:
each micro-batch is asked to be balanced, which is a little more than the batch as a whole.

T tokens of the batch, V vocabulary, M experts, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.config import TrainingConfig
from spes_p2p.model.head import HeadLosses
from spes_p2p.model.moe import Routing

DECAYED_BALANCE_START = 0.7
DECAYED_BALANCE_SHARE = 0.2
"""The decayed balance rises to 1 over this share of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The parts, unweighted scalars, and their weighted sum."""

    total: Tensor
    cross_entropy: Tensor
    z: Tensor
    balance: Tensor
    router_z: Tensor


def batch_losses(
    logits_TV: Tensor,
    targets_T: Tensor,
    routings: Sequence[Routing],
    config: TrainingConfig,
    count_scale_M: Tensor | None = None,
) -> Losses:
    """All parts for one batch, from its logits; `count_scale_M` is `owned_count_scale`'s, None for the plain balance.
    What the trainer computes in pieces, written down plainly."""
    logits_TV = logits_TV.float()
    cross_entropy = F.cross_entropy(logits_TV, targets_T)
    z = logits_TV.logsumexp(dim=-1).square().mean()
    head = HeadLosses(cross_entropy + config.z_loss * z, cross_entropy, z)
    return with_router_losses(head, routings, config, count_scale_M)


def with_router_losses(
    head: HeadLosses,
    routings: Sequence[Routing],
    config: TrainingConfig,
    count_scale_M: Tensor | None = None,
    share: float = 1.0,
) -> Losses:
    """The head's losses and the routers'; those of a micro-batch count by its `share` of the batch's tokens, as the
    head's already do."""
    balance = torch.stack([layer_balance(routing, count_scale_M) for routing in routings]).mean() * share
    router_z = torch.stack([routing.logits_TM.logsumexp(dim=-1).square().mean() for routing in routings]).sum() * share
    total = head.total + config.balance_loss * balance + config.router_z_loss * router_z
    return Losses(total=total, cross_entropy=head.cross_entropy, z=head.z, balance=balance, router_z=router_z)


def layer_balance(routing: Routing, count_scale_M: Tensor | None = None) -> Tensor:
    """M * sum_j f_j * P_j of one layer; 1 at perfect balance, M if one expert gets everything."""
    num_experts = routing.counts_M.shape[0]
    share_M = routing.counts_M.float() / routing.experts_TK.numel()
    if count_scale_M is not None:
        share_M = share_M * count_scale_M
    return num_experts * (share_M * routing.probs_TM.mean(dim=0)).sum()


def owned_count_scale(owned_M: Tensor, step: int, total_steps: int) -> Tensor:
    """Scale of the slot counts under decayed balance: the peer's own experts count 0.7, rising to 1.0 over the first
    fifth of the run, so that they get more tokens while they are young. `owned_M` is a mask."""
    progress = min(1.0, step / (DECAYED_BALANCE_SHARE * total_steps))
    scale = DECAYED_BALANCE_START + (1.0 - DECAYED_BALANCE_START) * progress
    return torch.where(owned_M, scale, 1.0)
