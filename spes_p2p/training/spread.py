"""The engine of a peer with several devices: rank 0's, which tells the other ranks, and what those do when told.

A failure on any rank cannot be mended from inside: the others wait in an exchange that will not happen. `RankFailure`
is therefore no SpesError and no RuntimeError, so that nothing catches it: the trainer process ends, and with it all
ranks; the node starts another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol, get_args

import torch
from torch import Tensor

from spes_p2p.config import FrozenFormat, MomentsFormat, RunConfig
from spes_p2p.errors import SpesError
from spes_p2p.model.shards import expert_shapes, parse_expert_name, psi_shapes
from spes_p2p.model.transformer import Transformer, to_numpy
from spes_p2p.training import orders
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.engine import Engine, StateTensor
from spes_p2p.training.gradients import BatchLosses
from spes_p2p.training.moments import Buffers, HeldMoments, Moments, PackedMoments, unpack
from spes_p2p.training.optim import NamedAdamW, fits
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.ranks import GroupRanks
from spes_p2p.training.share import Share

MOMENT_KINDS: tuple[orders.MomentKind, ...] = get_args(orders.MomentKind)
CAUGHT_ABOVE = (RuntimeError, MemoryError, OSError, ValueError, KeyError, SpesError)
"""What somebody on one device can answer to: by a smaller plan, another checkpoint, a word to the node."""


class RankFailure(Exception):
    """The ranks are out of step; this process is to end."""


class Team(Protocol):
    """The ranks, as rank 0 sees them."""

    @property
    def ranks(self) -> GroupRanks:
        """Rank 0's side of the process group."""
        ...

    def tell(self, order: orders.Order) -> None:
        """Have every other rank perform this order."""
        ...

    def await_culprit(self) -> None:
        """Called when an exchange failed here: if another rank has ended, end this process, with its reason."""
        ...


class SpreadEngine(Engine):
    """A model and its optimizer on the devices of all ranks. Lives in rank 0."""

    def __init__(
        self,
        config: RunConfig,
        team: Team,
        *,
        frozen_format: FrozenFormat = "fp32",
        moments: MomentsFormat = "fp32",
    ) -> None:
        # not Engine's own, which would put the whole model on one device
        self.config = config
        self.device = team.ranks.device
        self.num_ranks = team.ranks.count
        self._team = team
        begin = orders.Begin(config=config.to_json(), frozen_format=frozen_format, moments=moments)
        with self._together(begin):
            self._share = Share(begin, team.ranks)
        self._psi = tuple(sorted(psi_shapes(config.model)))

    @property
    def model(self) -> Transformer:
        """Rank 0's share. `set_owned` makes another, so it is not to be kept."""
        return self._share.model

    @property
    def optimizer(self) -> NamedAdamW:
        """Rank 0's share. `set_owned` makes another, so it is not to be kept."""
        return self._share.optimizer

    @contextmanager
    def _together(self, order: orders.Order) -> Iterator[None]:
        """Tell the others, and do the same within."""
        try:
            self._team.tell(order)
            yield
        except CAUGHT_ABOVE as error:
            self._team.await_culprit()
            raise RankFailure(f"{self.device}: {type(error).__name__}: {error}") from error

    # ---------------------------------------------------------------------------------------------------------- weights

    def set_owned(self, experts: Collection[int]) -> None:
        """See `Engine`."""
        if unknown := sorted(j for j in experts if not 0 <= j < self.config.model.num_experts):
            raise ValueError(f"no expert {unknown[0]} in a model of {self.config.model.num_experts}")
        order = orders.SetOwned(experts=tuple(sorted(experts)))
        with self._together(order):
            self._share.set_owned(order)

    def load(self, tensors: Mapping[str, F32]) -> None:
        """See `Engine`."""
        self._share.model.require_fitting(tensors)
        order = orders.Load(shapes=tuple((name, values.shape) for name, values in tensors.items()))
        with self._together(order):
            self._share.load(order, tensors)

    def weights(self, names: Iterable[str] | None = None) -> Tensors:
        """See `Engine`."""
        order = orders.Gather(names=tuple(self._trained() if names is None else names))
        with self._together(order):
            return {name: to_numpy(whole) for name, whole in self._share.gather(order.names)}

    def host_weight(self, name: str) -> F32:
        """See `Engine`; a copy here."""
        return self.weights((name,))[name]

    def weights_are_finite(self) -> bool:
        """See `Engine`."""
        with self._together(orders.CheckFinite()):
            return self._share.num_not_finite() == 0

    def _trained(self) -> tuple[str, ...]:
        return (*self._psi, *self._share.model.owned())

    # -------------------------------------------------------------------------------------------------------- computing

    def add_gradients(self, tokens_BT1: Tensor, plan: StepPlan, count_scale_M: Tensor | None) -> BatchLosses:
        """See `Engine`. The plan's micro-batches are those of each rank."""
        num_sequences, length = tokens_BT1.shape
        order = orders.AddGradients(
            shape=(num_sequences, length),
            micro_sequences=plan.micro_sequences,
            checkpoint=plan.checkpoint,
            count_scale=None if count_scale_M is None else tuple(count_scale_M.tolist()),
        )
        with self._together(order):
            return self._share.add_gradients(order, tokens_BT1)

    def step(self, learning_rate: float) -> float | None:
        """See `Engine`."""
        with self._together(orders.Step(learning_rate=learning_rate)):
            return self._share.optimizer.step(learning_rate)

    def drop_gradients(self) -> None:
        """See `Engine`."""
        with self._together(orders.DropGradients()):
            self._share.optimizer.drop_gradients()

    def nats(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Engine`."""
        num_sequences, length = tokens_BT.shape
        order = orders.Nats(shape=(num_sequences, length))
        with self._together(order):
            return self._share.nats(order, tokens_BT, targets_BT)

    # ---------------------------------------------------------------------------------------------------------- moments

    def moments(self, names: Iterable[str]) -> dict[str, Moments]:
        """See `Engine`."""
        num_steps = self.num_steps()
        return {
            name: Moments(
                mean=self._moment(name, "mean"), square=self._moment(name, "square"), num_steps=num_steps[name]
            )
            for name in names
            if name in num_steps
        }

    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine`."""
        trained = set(self._trained())
        for name, values in moments.items():
            if name not in trained or not self._shape(name) == values.mean.shape == values.square.shape:
                raise ValueError(f"no trained tensor {name} of shape {list(values.mean.shape)}")
        order = orders.LoadMoments(
            shapes=tuple((name, values.mean.shape) for name, values in moments.items()),
            num_steps=tuple(values.num_steps for values in moments.values()),
        )
        with self._together(order):
            self._share.load_moments(order, moments)

    def state(self) -> dict[str, StateTensor]:
        """See `Engine`; moments are fp32 here, whatever the format: ranks' blocks are no whole weight's."""
        found = {f"weight/{name}": self._later(name, partial(self.host_weight, name)) for name in self._trained()}
        for name in self.num_steps():
            for kind in MOMENT_KINDS:
                found[f"{kind}/{name}"] = self._later(name, partial(self._moment, name, kind))
        return found

    def load_held(self, held: Mapping[str, HeldMoments]) -> None:
        """See `Engine`."""
        trained = set(self._trained())
        for name, values in held.items():
            if name not in trained or not fits(values.moments, torch.empty(self._shape(name), device="meta")):
                raise ValueError(f"no trained tensor {name} of this size")
        buffers = Buffers.on(torch.device("cpu"))
        for name, values in held.items():
            plain = values.moments
            if isinstance(plain, PackedMoments):
                plain = unpack(plain, torch.empty(self._shape(name)), buffers)
            whole = Moments(mean=to_numpy(plain.mean), square=to_numpy(plain.square), num_steps=values.num_steps)
            self.load_moments({name: whole})

    def forget_moments(self) -> None:
        """See `Engine`."""
        with self._together(orders.ForgetMoments()):
            self._share.optimizer.forget()

    def _later(self, name: str, read: Callable[[], F32]) -> StateTensor:
        return StateTensor(dtype=torch.float32, shape=self._shape(name), read=read)

    def _moment(self, name: str, kind: orders.MomentKind) -> F32:
        order = orders.GatherMoment(name=name, kind=kind)
        with self._together(order):
            return to_numpy(self._share.gather_moment(order))

    def _shape(self, name: str) -> tuple[int, ...]:
        parsed = parse_expert_name(name)
        return psi_shapes(self.config.model)[name] if parsed is None else expert_shapes(self.config.model)[parsed[2]]


def follow(ranks: GroupRanks, next_order: Callable[[], orders.Order]) -> None:
    """What every rank but 0 does, for ever: the same as `SpreadEngine` within `_together`, order by order."""
    share: Share | None = None
    while True:
        order = next_order()
        if isinstance(order, orders.Begin):
            share = Share(order, ranks)
        elif share is None:
            raise RankFailure("the first order must be Begin")
        else:
            _perform(share, order)


def _perform(share: Share, order: orders.Order) -> None:
    match order:
        case orders.SetOwned():
            share.set_owned(order)
        case orders.Load():
            share.load(order, None)
        case orders.Gather():
            for _ in share.gather(order.names):
                pass
        case orders.GatherMoment():
            share.gather_moment(order)
        case orders.LoadMoments():
            share.load_moments(order, None)
        case orders.ForgetMoments():
            share.optimizer.forget()
        case orders.AddGradients():
            share.add_gradients(order, None)
        case orders.Step():
            share.optimizer.step(order.learning_rate)
        case orders.DropGradients():
            share.optimizer.drop_gradients()
        case orders.CheckFinite():
            share.num_not_finite()
        case orders.Nats():
            share.nats(order, None, None)
        case orders.Begin():
            raise RankFailure("Begin is not performed by a share")
