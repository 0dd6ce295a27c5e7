"""What one layer keeps for its backward pass, and what it works in, in bytes: formulas of what the code does.

The forward pass of a layer keeps, per token, in values of the type in brackets (a: 4 bytes on a CPU, 2 under autocast):

    attention   its input D, the numbers of the norms and of the softmax [4 bytes]; the normed input D; q and k before
                and after norm and rotation; v; what attention gives [a]
    routing     the sum D and one number, the normed sum D, the probabilities M, K weights before and after they are
                normalised with their sum [4 bytes], K expert numbers [8 bytes]
    experts     the two pre-activations, 2 K F, and under autocast the normed sum D again [a]
    held        kept by other hands: the router's logits M [4 bytes], the order of the slots K [8 bytes]

Under autocast the normed input is kept once for each of q, k and v, and q and k as the norms read them, in 4 bytes.
`testing/saved.py` counts the same on a CPU (tests/unit/training/test_memory.py); the form under autocast follows from
the code and is not measured. A checkpointed layer keeps its input D [4 bytes], and what the losses read of its routing.

T tokens, D width, M experts, K experts per token, F expert width, S slots, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config import ModelConfig
from spes_p2p.model.expert_grouped import STACK_BYTES

BUSIEST = 2
"""Slots of the busiest expert over the mean; what training under a balance loss rarely passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Of one layer and some tokens."""

    attention: int
    routing: int
    experts: int
    held: int
    checkpointed: int
    """What it keeps instead of all of that when it is checkpointed."""
    attention_work: int
    """Most that attention needs beside it, in its backward pass."""
    experts_work: int
    """Most that the experts need beside it, in their backward pass, without gradients of weights."""

    @property
    def kept(self) -> int:
        """Until the layer's backward pass."""
        return self.attention + self.routing + self.experts + self.held

    @property
    def work(self) -> int:
        """While the layer is computed."""
        return max(self.attention_work, self.experts_work)


def layer_bytes(model: ModelConfig, num_tokens: int, *, on_gpu: bool) -> LayerBytes:
    """For `num_tokens` tokens of whole sequences."""
    width, k, heads, kv_heads = model.width, model.top_k, model.num_heads, model.num_kv_heads
    q_width, k_width = heads * model.resolved_head_dim, kv_heads * model.resolved_head_dim
    wide = 2 if on_gpu else 4
    norms = 1 + (heads + kv_heads if model.qk_norm == "head" else 2)
    attention = 4 * (width + norms + heads) + wide * ((q_width + k_width) + k_width + q_width)
    if on_gpu:
        attention += wide * 3 * width + 4 * (q_width + k_width)
    else:
        attention += wide * (width + q_width + k_width)
    normalised = k + 1 if model.norm_topk_prob else 0
    routing = 4 * (2 * width + 1 + model.num_experts + k + normalised) + 8 * k
    experts = wide * (2 * k * model.expert_width + (width if on_gpu else 0))
    held = 4 * model.num_experts + 8 * k
    read_by_losses = 4 * (2 * model.num_experts + k) + 16 * k
    # gradients of result, q, k, v and input, and what norm and rotation compute with; in fp32 on both kinds
    attention_work = 4 * (2 * width + 6 * q_width + 2 * k_width)
    return LayerBytes(
        attention=num_tokens * attention,
        routing=num_tokens * routing,
        experts=num_tokens * experts,
        held=num_tokens * held,
        checkpointed=num_tokens * (4 * width + read_by_losses),
        attention_work=num_tokens * attention_work,
        experts_work=_grouped_work(model, num_tokens) if on_gpu else _looped_work(model, num_tokens),
    )


def _looped_work(model: ModelConfig, num_tokens: int) -> int:
    """`expert_loop`: gradients of result and input, one decoded matrix, and for the slots of the busiest expert two
    buffers [., D] and four [., F]."""
    slots = num_tokens * model.top_k
    busiest = min(num_tokens, -(-BUSIEST * slots // model.num_experts))
    per_slot = 2 * model.width + 4 * model.expert_width
    return 4 * (2 * num_tokens * model.width + model.width * model.expert_width + busiest * per_slot)


def _grouped_work(model: ModelConfig, num_tokens: int) -> int:
    """`expert_grouped`: of all slots the input, the gradients of result and input, and the slots gathered [S, D]; a
    stack of decoded weights, and for its slots, all of them at most, five intermediate results [., F]. bf16."""
    slots = num_tokens * model.top_k
    one = 2 * model.width * model.expert_width
    stack = max(one, min(STACK_BYTES, model.num_experts * one))
    return 2 * slots * (4 * model.width + 5 * model.expert_width) + stack + 8 * num_tokens * model.width
