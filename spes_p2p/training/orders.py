"""What rank 0 tells the other ranks of its peer to do with it. They travel in frames through a pipe to each; the values
that belong to an order follow through the process group."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from spes_p2p.config import FrozenFormat, MomentsFormat

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, shape) of whole tensors, in the order in which their values come."""
MomentKind: TypeAlias = Literal["mean", "square"]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Begin anew: a model without weights, an optimizer without moments."""

    config: bytes
    """`RunConfig.to_json`."""
    frozen_format: FrozenFormat
    moments: MomentsFormat


class SetOwned(msgspec.Struct, frozen=True, kw_only=True, tag="set_owned"):
    """See `Engine.set_owned`."""

    experts: tuple[int, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """See `Engine.load`."""

    shapes: Shapes


class Gather(msgspec.Struct, frozen=True, kw_only=True, tag="gather"):
    """Put trained weights together."""

    names: tuple[str, ...]


class GatherMoment(msgspec.Struct, frozen=True, kw_only=True, tag="gather_moment"):
    """Put one moment of one weight together."""

    name: str
    kind: MomentKind


class LoadMoments(msgspec.Struct, frozen=True, kw_only=True, tag="load_moments"):
    """Replace moments: mean, then square of each weight."""

    shapes: Shapes
    num_steps: tuple[int, ...]


class ForgetMoments(msgspec.Struct, frozen=True, kw_only=True, tag="forget_moments"):
    """See `Engine.forget_moments`."""


class AddGradients(msgspec.Struct, frozen=True, kw_only=True, tag="add_gradients"):
    """See `gradients.add_gradients`; the tokens follow."""

    shape: tuple[int, int]
    """[B, T + 1]."""
    micro_sequences: int
    checkpoint: bool
    count_scale: tuple[float, ...] | None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """See `NamedAdamW.step`."""

    learning_rate: float


class DropGradients(msgspec.Struct, frozen=True, kw_only=True, tag="drop_gradients"):
    """Free all gradients."""


class CheckFinite(msgspec.Struct, frozen=True, kw_only=True, tag="check_finite"):
    """See `Engine.weights_are_finite`."""


class Nats(msgspec.Struct, frozen=True, kw_only=True, tag="nats"):
    """See `Engine.nats`; inputs and targets follow."""

    shape: tuple[int, int]
    """[B, T] of both."""


Order: TypeAlias = (
    Begin
    | SetOwned
    | Load
    | Gather
    | GatherMoment
    | LoadMoments
    | ForgetMoments
    | AddGradients
    | Step
    | DropGradients
    | CheckFinite
    | Nats
)
