"""How much memory a node's training needs, reckoned before anything is made: the memory model.

What is held all the time, in bytes (P values of psi, E of the owned experts; docs/memory.md):

    weights    4 P + 4 E                         moments    8, or 2.03, bytes for each of P and E (`moments_bytes`)
    frozen     by format, the other shards (`frozen_bytes`)

and what comes and goes by phase; the peak is what is held and the largest phase:

    loss             what all layers keep (training/kept.py), the final norm's input and output, the gradient of the
                     hidden state, of the head 4 V D, a chunk of logits; 4 (P + E) instead of 4 V D from the second
                     micro-batch on; under autocast weights in bf16, and 64 MiB that are added to the head's gradient
    backward begins  the same without the chunk, with one layer's work, and if checkpointed all that it keeps
    backward ends    all gradients 4 (P + E), one layer's work and what it keeps; from the second micro-batch on one
                     more gradient of the embedding
    step             all gradients, and the optimizer's buffers
    load             a shard in fp32 twice, as the next is read while the one before is stored; one tensor of psi
    publish          psi's delta and what it leaves over 8 P, the remainders of the own shards 4 E, and one shard's
                     blob, in pieces and whole: 4 bytes a value
    checkpoint       one tensor, where it is brought from the GPU; nothing on a CPU

Residual and updates under way lie in the last checkpoint's file, psi's start and the blobs in the store: mapped, not
held. Load, publish and checkpoint work in host memory; on a CPU all of it is one pool. Not in here: the libraries, the
text (up to 256 MB), and the holes between blocks, for which `Pool.peak` adds a share.

On several devices the pools are those of the first rank: `memory_ranks` says what it holds whole, and for how long.

D width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.model.frozen import frozen_bytes
from spes_p2p.model.head import CHUNK_BYTES
from spes_p2p.model.products import ADDED_BYTES
from spes_p2p.model.shards import expert_shapes, psi_shapes, shard_shapes
from spes_p2p.training.kept import LayerBytes, layer_bytes
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.memory_ranks import HOLES_OF_RANKS, exchange_bytes, own_rows
from spes_p2p.training.moments import CPU_CHUNK_VALUES, GPU_CHUNK_VALUES, moments_bytes
from spes_p2p.training.plan import StepPlan, whole_batch

HOLES = 0.06
"""Share that allocators lose in holes between blocks: measured on a CPU (docs/LOG.md)."""

Amounts = tuple[tuple[str, int], ...]
"""(what, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory of one kind: what is held in it all the time, and what each phase adds."""

    held: Amounts
    phases: tuple[tuple[str, Amounts], ...]
    holes: float = HOLES

    @property
    def held_bytes(self) -> int:
        """All the time."""
        return _sum(self.held)

    @property
    def peak_phase(self) -> tuple[str, Amounts]:
        """The phase that adds most."""
        return max(self.phases, key=lambda phase: _sum(phase[1]))

    @property
    def peak_bytes(self) -> int:
        """What is held and what the largest phase adds, holes included."""
        return round((self.held_bytes + _sum(self.peak_phase[1])) * (1 + self.holes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one node's trainer needs."""

    num_owned: int
    """Shards."""
    plan: StepPlan
    device: Pool
    """On a CPU the only pool, in main memory."""
    host: Pool | None
    """Main memory beside a GPU; None on a CPU."""

    def rows(self) -> list[tuple[str, str, int]]:
        """(pool, what, bytes) of the peak of each pool, for tables; the holes and the sum come last."""
        found = []
        for where, pool in (("device", self.device), ("host", self.host)):
            if pool is None:
                continue
            phase, added = pool.peak_phase
            amounts = [*pool.held, *((f"{what} ({phase})", size) for what, size in added)]
            found += [(where, what, size) for what, size in amounts if size]
            found.append((where, "holes", pool.peak_bytes - sum(size for _, size in amounts)))
            found.append((where, "all", pool.peak_bytes))
        return found


def memory_need(config: RunConfig, node: NodeConfig, num_owned: int, plan: StepPlan) -> MemoryNeed:
    """The need of a node that owns so many shards and trains by this plan. Device and formats are those of `node`."""
    on_gpu = node.device != "cpu"
    held = held_amounts(config, node, num_owned)
    step, rest = _step_phases(config, node, num_owned, plan), _host_phases(config, node, num_owned)
    holes = HOLES if node.num_ranks == 1 else HOLES_OF_RANKS
    if not on_gpu:
        pool = Pool(held=held, phases=step + rest, holes=holes)
        return MemoryNeed(num_owned=num_owned, plan=plan, device=pool, host=None)
    device, host = Pool(held=held, phases=step, holes=holes), Pool(held=(), phases=rest)
    return MemoryNeed(num_owned=num_owned, plan=plan, device=device, host=host)


def held_amounts(config: RunConfig, node: NodeConfig, num_owned: int) -> Amounts:
    """What is on the device from the first step on: weights, frozen experts, moments. Exact on one device; on several
    the first one's rows of all tensors."""
    model, num_ranks = config.model, node.num_ranks
    matrices = [own_rows(shape, num_ranks) for shape in expert_shapes(model).values()]
    num_own_experts = model.num_layers * config.experts_per_shard * num_owned
    num_frozen = model.num_layers * model.num_experts - num_own_experts
    psi = [math.prod(own_rows(shape, num_ranks)) for shape in psi_shapes(model).values()]
    own = [math.prod(shape) for shape in matrices]
    return (
        ("weights of psi", 4 * sum(psi)),
        ("own experts", 4 * num_own_experts * sum(own)),
        ("frozen experts", num_frozen * sum(frozen_bytes(node.frozen_format, shape) for shape in matrices)),
        ("moments of psi", sum(moments_bytes(size, node.moments) for size in psi)),
        ("moments of own experts", num_own_experts * sum(moments_bytes(size, node.moments) for size in own)),
    )


def _step_phases(
    config: RunConfig, node: NodeConfig, num_owned: int, plan: StepPlan
) -> tuple[tuple[str, Amounts], ...]:
    model, training = config.model, config.training
    on_gpu = node.device != "cpu"
    most = whole_batch(training, node.num_ranks).micro_sequences
    num_tokens = min(plan.micro_sequences, most) * training.sequence_length
    is_split = plan.micro_sequences < most
    layer = layer_bytes(model, num_tokens, on_gpu=on_gpu)
    exchange = exchange_bytes(config, node, num_owned)
    whole = ("layers and ends gathered from all ranks", exchange.layers + exchange.ends)
    layer_sums = ("a layer's gradients to be summed", exchange.layer_sums)
    end_sums = ("gradients of embedding and head to be summed", exchange.end_sums)
    gradients = 4 * (_psi_values(config) + num_owned * _shard_values(config)) // node.num_ranks
    head = 4 * model.vocab_size * model.width
    first = ("gradients so far", gradients if is_split else head)
    hidden = 4 * num_tokens * model.width
    ends = ("final norm and gradient of the hidden state", 2 * hidden)
    kept = _kept(layer, model.num_layers, plan)
    again = ("one layer again", layer.kept if plan.checkpoint else 0)
    head_cast, layers_cast = _bf16_weights(config) if on_gpu else (0, 0)
    casts = ("weights in bf16", head_cast + layers_cast)
    casts_kept = ("weights in bf16", layers_cast // model.num_layers if plan.checkpoint else layers_cast)
    chunk = ("a chunk of logits", _logits(config, num_tokens, on_gpu=on_gpu))
    product = ("product for the head's gradient", min(head // 2, ADDED_BYTES) if on_gpu else 0)
    chunk_values = GPU_CHUNK_VALUES if on_gpu else CPU_CHUNK_VALUES
    second = ("a second gradient of the embedding", head if is_split else 0)
    last = ("one layer", layer.kept + layer.work)
    return (
        (
            "loss",
            (
                *kept,
                first,
                ends,
                ("hidden state", hidden),
                chunk,
                product,
                casts,
                whole,
            ),
        ),
        ("backward begins", (*kept, again, first, ends, ("work of one layer", layer.work), casts_kept, whole)),
        ("backward ends", (("gradients", gradients), last, second, whole, layer_sums)),
        ("sums of the ends", (("gradients", gradients), whole, end_sums)),
        ("step", (("gradients", gradients), ("optimizer's buffers", 5 * 4 * chunk_values))),
    )


def _kept(layer: LayerBytes, num_layers: int, plan: StepPlan) -> Amounts:
    if plan.checkpoint:
        return (("inputs of the layers", num_layers * layer.checkpointed),)
    return (
        ("kept by attention", num_layers * layer.attention),
        ("kept by routing", num_layers * (layer.routing + layer.held)),
        ("kept by experts", num_layers * layer.experts),
    )


def _host_phases(config: RunConfig, node: NodeConfig, num_owned: int) -> tuple[tuple[str, Amounts], ...]:
    """Outside of steps: there are no activations and no gradients then."""
    on_gpu = node.device != "cpu"
    gathered = ("a tensor from all ranks", 0 if on_gpu else exchange_bytes(config, node, num_owned).tensor)
    psi, shard = _psi_values(config), _shard_values(config)
    largest = 4 * max(math.prod(shape) for shape in psi_shapes(config.model).values())
    part = 8 * psi // psi_layout(config).num_parts
    delta = ("psi's delta and what it leaves over", 8 * psi)
    remainders = ("remainders of own shards", 4 * num_owned * shard)
    return (
        ("load", (("shards in fp32", 2 * 4 * shard), ("a tensor of psi", largest), gathered)),
        ("publish", (delta, remainders, ("a part in fp64", 6 * part), ("one shard's blob", 4 * shard), gathered)),
        ("checkpoint", (delta, remainders, ("a tensor", largest if on_gpu else 0), gathered)),
    )


def _logits(config: RunConfig, num_tokens: int, *, on_gpu: bool) -> int:
    """fp32, and under autocast in bf16 as well: before they are widened, and then their gradient."""
    most = CHUNK_BYTES["cuda" if on_gpu else "cpu"]
    chunk = max(4 * config.model.vocab_size, min(most, 4 * num_tokens * config.model.vocab_size))
    return chunk + chunk // 2 if on_gpu else chunk


def _bf16_weights(config: RunConfig) -> tuple[int, int]:
    """Copies under autocast: of the head while it computes, and of all layers' attention, which the forward pass keeps
    to its end and the backward pass as far as it was not checkpointed."""
    matrices = [shape for name, shape in psi_shapes(config.model).items() if ".attention." in name and len(shape) == 2]
    return 2 * config.model.vocab_size * config.model.width, 2 * sum(map(math.prod, matrices))


def _psi_values(config: RunConfig) -> int:
    return sum(map(math.prod, psi_shapes(config.model).values()))


def _shard_values(config: RunConfig) -> int:
    return sum(map(math.prod, shard_shapes(config.model, config.experts_per_shard, 0).values()))


def _sum(amounts: Amounts) -> int:
    return sum(size for _, size in amounts)
