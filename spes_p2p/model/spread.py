"""A model spread over several devices by FSDP2: each rank holds its rows of every tensor, frozen experts included.

FSDP2 gathers a layer whole for its forward and backward pass and lets go of it again; embedding, last norm and head
stay whole from the forward to the backward pass. It does so for parameters only, so the buffers of frozen experts
become parameters without gradients here: their storage is split as well, and travels as it is stored (int8, say).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from spes_p2p.config import FrozenFormat, ModelConfig
from spes_p2p.model.transformer import Layer, Transformer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

ENTRANCES = ("losses", "nats")
"""Methods that compute with parameters, besides `forward`."""


def build_spread(
    config: ModelConfig,
    frozen_format: FrozenFormat,
    owned: Collection[int],
    device: torch.device,
    mesh: DeviceMesh,
) -> Transformer:
    """One rank's share of a model of zeros that trains the experts `owned`. No rank ever holds the whole model.

    Gradients are summed over the ranks, so each takes its part of the batch's loss. Experts cannot change sides any
    more: for other ones, build another. Raises ValueError for an expert that the model lacks.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    with torch.device("meta"):
        model = Transformer(config, frozen_format)
        model.set_owned(owned)
    for module in list(model.modules()):
        _buffers_to_parameters(module)
    for layer in model.layers:
        # an expert may have tokens on one rank only, and yet its gradient is exchanged by all
        cast(Layer, layer).experts.complete_gradients = True
        _sum_gradients(fully_shard(layer, mesh=mesh))
    _sum_gradients(fully_shard(model, mesh=mesh))
    for name in ENTRANCES:
        register_fsdp_forward_method(model, name)
    model.gives_back_early = True  # exchanges make holes of their own
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def let_go(model: Transformer) -> None:
    """Have nothing of a spread model stay gathered: after a forward pass without a backward pass, without which the
    next one would compute with old values."""
    cast("FSDPModule", model).reshard()


def _buffers_to_parameters(module: nn.Module) -> None:
    for name, buffer in list(module.named_buffers(recurse=False)):
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _sum_gradients(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to not divide
