"""What the memory model counts of a rank, one of several devices of a peer (docs/several-gpus.md), in bytes.

Of every tensor a rank holds its rows. Beside them there are, as FSDP2 makes them:

    whole layers     one that is computed and one that arrives, with the buffer it arrives in: 3 layers, frozen experts
                     as they are stored
    whole ends       embedding, last norm and head, from the forward pass to the end of the backward pass
    layers' sums     a layer's gradients whole, the buffer that they are summed in, and its rows of the sum
    ends' sums       the same of embedding, last norm and head
    a whole tensor   where weights are put together for the host, three times: as it arrives (gloo has a copy of its
                     own), whole, and for numpy

One device has none of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.model.frozen import frozen_bytes
from spes_p2p.model.shards import expert_shapes, psi_shapes

WHOLE_LAYERS = 3
HOLES_OF_RANKS = 0.08
"""What is in the way beside that, as a share: exchanges have buffers of their own. Measured on CPUs with gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBytes:
    """What is whole on a rank for a while; zeros for one device."""

    layers: int = 0
    ends: int = 0
    layer_sums: int = 0
    end_sums: int = 0
    tensor: int = 0


def exchange_bytes(config: RunConfig, node: NodeConfig, num_owned: int) -> ExchangeBytes:
    """Of each rank of a node that owns so many shards."""
    if node.num_ranks == 1:
        return ExchangeBytes()
    model = config.model
    psi = {name: 4 * math.prod(shape) for name, shape in psi_shapes(model).items()}
    ends = sum(size for name, size in psi.items() if not name.startswith("layers."))
    matrices = list(expert_shapes(model).values())
    num_own = config.experts_per_shard * num_owned
    trained = (sum(psi.values()) - ends) // model.num_layers + 4 * num_own * sum(map(math.prod, matrices))
    frozen = (model.num_experts - num_own) * sum(frozen_bytes(node.frozen_format, shape) for shape in matrices)
    return ExchangeBytes(
        layers=WHOLE_LAYERS * (trained + frozen),
        ends=ends,
        layer_sums=2 * trained + trained // node.num_ranks,
        end_sums=2 * ends + ends // node.num_ranks,
        tensor=3 * max(psi.values()),
    )


def own_rows(shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Shape of the rows that the first rank holds of a tensor: it never has fewer than another."""
    return (-(-shape[0] // num_ranks), *shape[1:])
