"""Names and shapes of all tensors of a model, and which of them an expert shard holds.

The only place that makes or parses parameter names. psi, the shared modules, carries the module paths of the
transformer (`layers.0.attention.q.weight`); an expert tensor is `layers.{l}.experts.{j}.{gate|up|down}`, with j the
expert's index in the whole model. Imports no torch, so that whoever only moves or checks tensors can use it.

D width, F expert width, V vocabulary, M experts, Nq and Nk query and key heads, Hd head width.
"""

from __future__ import annotations

import functools
import math
import re
from types import MappingProxyType

from spes_p2p.config import ModelConfig

MATRICES = ("gate", "up", "down")
"""The three matrices of a SwiGLU expert, in canonical order."""

_EXPERT_NAME = re.compile(r"layers\.(0|[1-9][0-9]*)\.experts\.(0|[1-9][0-9]*)\.(gate|up|down)")


def psi_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the shared modules, sorted by name."""
    return dict(_psi_shapes(config))


@functools.lru_cache(maxsize=64)
def _psi_shapes(config: ModelConfig) -> MappingProxyType[str, tuple[int, ...]]:
    width, head_dim = config.width, config.resolved_head_dim
    q_width, k_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, width),
        "norm.weight": (width,),
        "head.weight": (config.vocab_size, width),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.attention_norm.weight": (width,),
            f"{prefix}.attention.q.weight": (q_width, width),
            f"{prefix}.attention.k.weight": (k_width, width),
            f"{prefix}.attention.v.weight": (k_width, width),
            f"{prefix}.attention.o.weight": (width, q_width),
            f"{prefix}.attention.q_norm.weight": (head_dim if config.qk_norm == "head" else q_width,),
            f"{prefix}.attention.k_norm.weight": (head_dim if config.qk_norm == "head" else k_width,),
            f"{prefix}.moe_norm.weight": (width,),
            f"{prefix}.moe.router.weight": (config.num_experts, width),
        }
    return MappingProxyType({name: shapes[name] for name in sorted(shapes)})


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each matrix of one expert in one layer: gate and up [F, D], down [D, F]."""
    return {
        "gate": (config.expert_width, config.width),
        "up": (config.expert_width, config.width),
        "down": (config.width, config.expert_width),
    }


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Name of one matrix of one expert."""
    return f"layers.{layer}.experts.{expert}.{matrix}"


def parse_expert_name(name: str) -> tuple[int, int, str] | None:
    """(layer, expert, matrix) of an expert tensor's name; None for any other name."""
    match = _EXPERT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def shard_experts(shard: int, experts_per_shard: int) -> range:
    """Expert indices of a shard; the same in every layer."""
    return range(shard * experts_per_shard, (shard + 1) * experts_per_shard)


def shard_of_expert(expert: int, experts_per_shard: int) -> int:
    """The shard that an expert belongs to."""
    return expert // experts_per_shard


def shard_tensor_names(config: ModelConfig, experts_per_shard: int, shard: int) -> tuple[str, ...]:
    """Names of a shard's tensors, sorted by layer, expert, and matrix in the order of `MATRICES`."""
    return tuple(
        expert_name(layer, expert, matrix)
        for layer in range(config.num_layers)
        for expert in shard_experts(shard, experts_per_shard)
        for matrix in MATRICES
    )


def shard_shapes(config: ModelConfig, experts_per_shard: int, shard: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a shard, in the order of `shard_tensor_names`."""
    shapes = expert_shapes(config)
    names = shard_tensor_names(config, experts_per_shard, shard)
    return {name: shapes[name.rpartition(".")[2]] for name in names}


def num_psi_values(config: ModelConfig) -> int:
    """Values in the shared modules."""
    return sum(math.prod(shape) for shape in _psi_shapes(config).values())


def num_expert_values(config: ModelConfig) -> int:
    """Values of one expert in one layer."""
    return sum(math.prod(shape) for shape in expert_shapes(config).values())


def num_shard_values(config: ModelConfig, experts_per_shard: int) -> int:
    """Values of one expert shard, all layers."""
    return config.num_layers * experts_per_shard * num_expert_values(config)
