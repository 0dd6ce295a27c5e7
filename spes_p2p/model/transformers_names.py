"""Our model in the words of Transformers: names of tensors and configuration of a checkpoint folder.

A model with qk-norm over the full width is an OLMoE, one with qk-norm per head a Qwen3-MoE; both name their tensors
alike. The names are those of checkpoint files (one tensor per expert and matrix), which Transformers, vLLM and
llama.cpp read; in memory Transformers stacks the experts of a layer. No tensor is transposed.
"""

from __future__ import annotations

from typing import Any

from spes_p2p.config import ModelConfig
from spes_p2p.model.shards import parse_expert_name

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "moe.router.weight": "mlp.gate.weight",
}


def transformers_name(name: str) -> str:
    """Name in a Transformers checkpoint of one of our tensors. Raises KeyError for a name that is none of ours."""
    if name in _TOP:
        return _TOP[name]
    if (parsed := parse_expert_name(name)) is not None:
        layer, expert, matrix = parsed
        return f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
    _, number, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
    return f"model.layers.{number}.{_IN_LAYER[rest]}"


def transformers_config(config: ModelConfig, max_length: int) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`, weights in fp32. `max_length`: longest sequence, in tokens.

    Raises ValueError for a shape that the family does not have: an OLMoE has no head width of its own.
    """
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.norm_topk_prob,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": max_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.qk_norm == "head":
        return shared | {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": config.resolved_head_dim,
            "moe_intermediate_size": config.expert_width,
            "intermediate_size": config.expert_width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if config.resolved_head_dim * config.num_heads != config.width:
        raise ValueError(
            f"an OLMoE's heads fill its width: {config.num_heads} heads of {config.resolved_head_dim} are not "
            f"{config.width} (qk_norm = head has heads of any width)"
        )
    return shared | {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "intermediate_size": config.expert_width,
        "clip_qkv": None,
    }
