"""The output head and what is computed from its logits, over chunks of tokens: logits of all tokens never exist.

A chunk's logits are made, reduced to a loss per token, turned in place into their own gradient, and gone: the
gradients of hidden state and head are complete before the backward pass begins (as in Liger Kernel, arXiv 2410.10989).
So the head's product is computed once, where recomputing it in the backward pass would cost a third more, and the
gradient of the head, [V, D], comes into being a little earlier than it would anyway.

T tokens, D width, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spes_p2p.model.products import add_product_, product

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Most bytes of one chunk's logits in fp32. On a GPU each chunk must be worth a pass over the head's gradient."""


class HeadLosses(NamedTuple):
    """Scalars; `total` alone has a gradient."""

    total: Tensor
    """cross_entropy + z_weight * z."""
    cross_entropy: Tensor
    z: Tensor
    """Of logsumexp(logits)^2."""


def head_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    z_weight: float,
    *,
    batch_tokens: int | None = None,
    weight_grad_VD: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> HeadLosses:
    """Cross-entropy and z-loss of logits hidden @ weight^T: sums over the tokens, divided by `batch_tokens` (default:
    T, which makes them means; a micro-batch names the tokens of its whole batch).

    Products are computed in autocast's type if it is on, losses in fp32 at least. With `weight_grad_VD`, the gradient
    of the weight that earlier micro-batches left, this one's is added to it here and now, whether a backward pass
    follows or not: then no second [V, D] buffer is made, and the backward pass gives the weight nothing.
    """
    total, cross_entropy, z = _HeadLosses.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        hidden_TD,
        weight_VD,
        targets_T,
        z_weight,
        batch_tokens or len(targets_T),
        weight_grad_VD,
        chunk_tokens or default_chunk_tokens(weight_VD),
    )
    return HeadLosses(total, cross_entropy, z)


@torch.no_grad()
def token_nats(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Cross-entropy of each token in nats, [T], fp32 at least. It has no gradient."""
    compute_VD = weight_VD.to(_compute_dtype(weight_VD))
    nats = []
    for chunk, logits_CV in _chunks_of_logits(hidden_TD, compute_VD, chunk_tokens or default_chunk_tokens(weight_VD)):
        target_C = logits_CV.gather(1, targets_T[chunk, None]).squeeze(1)
        lse_C, _ = _exponentials_(logits_CV)
        nats.append(lse_C - target_C)
    return torch.cat(nats)


def default_chunk_tokens(weight_VD: Tensor) -> int:
    """How many tokens' fp32 logits fit in CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES["cuda" if weight_VD.is_cuda else "cpu"] // (4 * weight_VD.shape[0]))


class _HeadLosses(torch.autograd.Function):
    """See `head_losses`. Saves the two gradients and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        z_weight: float,
        batch_tokens: int,
        weight_grad_VD: Tensor | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        compute_VD = weight_VD.to(_compute_dtype(weight_VD))
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        into_VD = None
        if needs_weight:
            into_VD = torch.zeros_like(weight_VD) if weight_grad_VD is None else weight_grad_VD
        nats, lses = [], []
        for chunk, logits_CV in _chunks_of_logits(hidden_TD, compute_VD, chunk_tokens):
            targets_C1 = targets_T[chunk, None]
            target_C = logits_CV.gather(1, targets_C1).squeeze(1)
            lse_C, sum_C = _exponentials_(logits_CV)
            nats.append(lse_C - target_C)
            lses.append(lse_C)
            if not (needs_hidden or needs_weight):
                continue
            # d(nats + z_weight * lse^2) / d logits = softmax * (1 + 2 * z_weight * lse) - onehot(target)
            scale_C = (1 + 2 * z_weight * lse_C) / sum_C / batch_tokens
            one_C1 = torch.full_like(targets_C1, -1 / batch_tokens, dtype=logits_CV.dtype)
            grad_CV = logits_CV.mul_(scale_C[:, None]).scatter_add_(1, targets_C1, one_C1).to(compute_VD.dtype)
            if grad_TD is not None:
                grad_TD[chunk] = product(grad_CV, compute_VD)
            if into_VD is not None:
                add_product_(into_VD, grad_CV.T, hidden_TD[chunk].to(compute_VD.dtype))
        ctx.save_for_backward(grad_TD, into_VD if weight_grad_VD is None else None)
        cross_entropy = torch.cat(nats).sum() / batch_tokens
        z = torch.cat(lses).square().sum() / batch_tokens
        total = cross_entropy + z_weight * z
        ctx.mark_non_differentiable(cross_entropy, z)
        return total, cross_entropy, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = ctx.saved_tensors
        if grads[0] != 1:  # 1 is what a loss's own backward() begins with: no pass over [V, D] then
            scaled = tuple(grad if grad is None else grad * grads[0] for grad in scaled)
        return (*scaled, None, None, None, None, None)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Autocast's type if it is on: cast by hand, since autocast would cast the whole weight anew for every chunk."""
    device_type = weight.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype


def _chunks_of_logits(hidden_TD: Tensor, compute_VD: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """(which tokens, their logits), all in one buffer: what is drawn from one chunk's is lost with the next."""
    num_tokens = len(hidden_TD)
    dtype = torch.promote_types(compute_VD.dtype, torch.float32)
    buffer_CV = hidden_TD.new_empty((min(chunk_tokens, num_tokens), len(compute_VD)), dtype=dtype)
    for first in range(0, num_tokens, chunk_tokens):
        chunk = slice(first, min(first + chunk_tokens, num_tokens))
        hidden_CD, logits_CV = hidden_TD[chunk].to(compute_VD.dtype), buffer_CV[: chunk.stop - first]
        if compute_VD.dtype == dtype:
            product(hidden_CD, compute_VD.T, out=logits_CV)
        else:
            logits_CV.copy_(hidden_CD @ compute_VD.T)
        yield chunk, logits_CV


def _exponentials_(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(logits - their maximum), in place. Returns (logsumexp of the logits, sums of those)."""
    max_C = logits_CV.amax(dim=1)
    sum_C = logits_CV.sub_(max_C[:, None]).exp_().sum(dim=1)
    return max_C + sum_C.log(), sum_C
