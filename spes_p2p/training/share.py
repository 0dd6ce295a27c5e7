"""One rank's share of a model and its optimizer. Every rank calls the same methods in the same order; values that only
rank 0 knows are given there and None elsewhere.

B sequences, T tokens of a sequence, M experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.model.experts import OwnedExpert
from spes_p2p.model.frozen import frozen_matrix
from spes_p2p.model.shards import parse_expert_name
from spes_p2p.model.spread import build_spread, let_go
from spes_p2p.model.transformer import Layer, Transformer, to_torch
from spes_p2p.training.arrays import F32
from spes_p2p.training.gradients import BatchLosses, add_gradients, autocast
from spes_p2p.training.moments import HeldMoments, Moments, PlainMoments
from spes_p2p.training.optim import NamedAdamW
from spes_p2p.training.orders import AddGradients, Begin, GatherMoment, Load, LoadMoments, Nats, SetOwned
from spes_p2p.training.out_of_memory import give_back
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.ranks import GroupRanks


class Share:
    """Begins with all weights zero and all experts frozen."""

    def __init__(self, begin: Begin, ranks: GroupRanks) -> None:
        self.config = RunConfig.from_json(begin.config)
        self.ranks = ranks
        self._begin = begin
        self._make((), {})

    def _make(self, owned: tuple[int, ...], held: dict[str, HeldMoments]) -> None:
        begin, ranks = self._begin, self.ranks
        self._owned = owned
        self.model: Transformer = build_spread(self.config.model, begin.frozen_format, owned, ranks.device, ranks.mesh)
        psi, training = self.model.psi(), self.config.training
        trained = psi | self.model.owned()
        ratios = dict.fromkeys(psi, training.psi_lr_ratio)
        self.optimizer = NamedAdamW(training, trained, begin.moments, ranks, rate_ratios=ratios)
        for name in list(held):
            moments = held.pop(name)
            if name in trained:
                self.optimizer.load_held({name: moments})

    # ---------------------------------------------------------------------------------------------------------- weights

    @torch.no_grad()
    def set_owned(self, order: SetOwned) -> None:
        """Make another model if other experts are trained now: FSDP2 has no way to change one."""
        if order.experts == self._owned:
            return
        kept = {name: self.ranks.local(weight) for name, weight in self.model.owned().items()}
        held = self.optimizer.held_moments()
        del self.model, self.optimizer  # before there need be room for the new ones
        give_back(self.ranks.device)
        self._make(order.experts, held)
        for name, weight in self.model.owned().items():
            if name in kept:
                self.ranks.local(weight).copy_(kept[name])

    @torch.no_grad()
    def load(self, order: Load, values: Mapping[str, F32] | None) -> None:
        """Take over whole tensors, this rank's rows of each."""
        for name, shape in order.shapes:
            self._store(name, self._from_first(shape, None if values is None else to_torch(values[name])))

    def _store(self, name: str, whole: Tensor) -> None:
        parsed = parse_expert_name(name)
        if parsed is None:
            self._store_rows(self.model.get_parameter(name), whole)
            return
        layer, index, matrix = parsed
        expert = cast(Layer, self.model.layers[layer]).experts.expert(index)
        if isinstance(expert, OwnedExpert):
            self._store_rows(expert.get_parameter(matrix), whole)
            return
        # a block of a storage format may lie across two ranks' rows: the whole matrix is encoded by each
        encoded = frozen_matrix(self._begin.frozen_format, tuple(whole.shape)).to(whole.device)
        encoded.store_(whole)
        for part, buffer in encoded.named_buffers():
            self._store_rows(expert.matrix(matrix).get_parameter(part), buffer)

    def _store_rows(self, target: Tensor, whole: Tensor) -> None:
        self.ranks.local(target).copy_(whole[self.ranks.rows(len(whole))])

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole trained weights. All ranks must go through all of them."""
        trained = self.model.psi() | self.model.owned()
        for name in names:
            yield name, self._whole(self.ranks.local(trained[name]).detach(), trained[name])

    def num_not_finite(self) -> int:
        """How many trained weights have values that are not, on any rank (a weight counts on each)."""
        weights = (self.model.psi() | self.model.owned()).values()
        own = sum(not bool(torch.isfinite(self.ranks.local(weight)).all()) for weight in weights)
        return int(self.ranks.sum(own)[0])

    # -------------------------------------------------------------------------------------------------------- computing

    def add_gradients(self, order: AddGradients, tokens_BT1: Tensor | None) -> BatchLosses:
        """Add this rank's part of a batch's gradients. Returns the losses of all of it."""
        tokens_BT1 = self._from_first(order.shape, tokens_BT1, torch.int64)
        scale_M = None
        if order.count_scale is not None:
            scale_M = torch.tensor(order.count_scale, dtype=torch.float32, device=self.ranks.device)
        plan = StepPlan(micro_sequences=order.micro_sequences, checkpoint=order.checkpoint)
        return add_gradients(self.model, tokens_BT1, self.config.training, plan, scale_M, self.ranks)

    def nats(self, order: Nats, inputs_BT: Tensor | None, targets_BT: Tensor | None) -> Tensor:
        """See `Engine.nats`; the same on every rank, which computes its sequences of it."""
        inputs_BT = self._from_first(order.shape, inputs_BT, torch.int64)
        targets_BT = self._from_first(order.shape, targets_BT, torch.int64)
        num_sequences = order.shape[0]
        rows = self.ranks.rows(num_sequences)
        some = rows if rows.start < rows.stop else slice(0, 1)  # every rank must help to gather the layers
        with autocast(self.ranks.device):
            nats_BT = self.model.nats(inputs_BT[some], targets_BT[some])
        let_go(self.model)
        return self.ranks.gather(nats_BT[: rows.stop - rows.start], num_sequences)

    # ---------------------------------------------------------------------------------------------------------- moments

    def gather_moment(self, order: GatherMoment) -> Tensor:
        """A whole moment of a weight, fp32. Raises ValueError if the weight has none."""
        held = self.optimizer.plain_moments(order.name)
        if held is None:
            raise ValueError(f"{order.name} has no moments")
        return self._whole(held[0].tensors()[order.kind], self.model.get_parameter(order.name))

    def load_moments(self, order: LoadMoments, values: Mapping[str, Moments] | None) -> None:
        """Replace moments by this rank's rows of whole ones."""
        for (name, shape), num_steps in zip(order.shapes, order.num_steps, strict=True):
            given = None if values is None else values[name]
            rows = self.ranks.rows(shape[0])
            mean = self._from_first(shape, None if given is None else to_torch(given.mean))[rows]
            square = self._from_first(shape, None if given is None else to_torch(given.square))[rows]
            held = HeldMoments(moments=PlainMoments(mean=mean, square=square), num_steps=num_steps)
            self.optimizer.load_held({name: held})

    # --------------------------------------------------------------------------------------------------------- exchange

    def _from_first(self, shape: tuple[int, ...], values: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rank 0's values, on every rank's device."""
        whole = torch.empty(shape, dtype=dtype, device=self.ranks.device)
        if values is not None:
            whole.copy_(values)
        return self.ranks.from_first_(whole)

    def _whole(self, rows: Tensor, like: Tensor) -> Tensor:
        return self.ranks.gather(rows, like.shape[0])
