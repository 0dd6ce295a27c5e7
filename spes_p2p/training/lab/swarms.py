"""The ways to train that an experiment compares: each makes rounds, and has weights that can be evaluated.

N peers, H inner steps of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.ids import Digest
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import to_numpy
from spes_p2p.ports import BlobStore
from spes_p2p.training.arrays import F32, F64, Tensors
from spes_p2p.training.data import TokenStream
from spes_p2p.training.lab.experiment import OuterConfig, PairConfig
from spes_p2p.training.lab.outer_rules import mean_of, nesterov_step, pair_step, pairs_of
from spes_p2p.training.lab.rounds import CutUpdate, TrainingRounds
from spes_p2p.training.lab.streams import joined
from spes_p2p.training.layout import flatten, part_from_bytes, part_to_bytes, psi_layout, unflatten
from spes_p2p.training.start import StartReader
from spes_p2p.training.trainer import RoundStart, Trainer

Weights = tuple[Tensors, Iterator[tuple[int, Tensors]]]
"""psi, and (shard, its tensors) of every shard."""


class Swarm(Protocol):
    """A way to train one model on the text of several peers."""

    def round(self, num_steps: int) -> None:
        """Every peer makes so many inner steps, and they exchange what is theirs to exchange."""
        ...

    def weights(self) -> Weights:
        """The agreed weights."""
        ...


def owners_of_shards(num_shards: int, num_peers: int, owners_per_shard: int) -> dict[int, tuple[int, ...]]:
    """Shard -> places of its owners: shard s belongs to peer s mod N and those after it."""
    return {
        shard: tuple(sorted((shard + more) % num_peers for more in range(owners_per_shard)))
        for shard in range(num_shards)
    }


class Alone:
    """Centralised: one trainer owns everything, and a batch is the sum of the peers' batches."""

    def __init__(self, config: RunConfig, streams: Sequence[TokenStream]) -> None:
        batch = config.training.batch_sequences * len(streams)
        training = config.training.model_copy(update={"batch_sequences": batch})
        self._config = config.model_copy(update={"training": training})
        self._trainer = Trainer(self._config, joined(streams))
        everything = tuple(range(config.num_shards))
        self._trainer.load_start(
            _start(1, 0, initial_psi(config.model, config.seed), genesis_shards(config), everything)
        )

    def round(self, num_steps: int) -> None:
        """Inner steps alone: nothing is exchanged."""
        self._trainer.train(num_steps)

    def weights(self) -> Weights:
        """As trained."""
        return _trained_psi(self._trainer), ((shard, self._trainer.trained(shard)) for shard in self._trainer.owned)


class Spes:
    """SPES, on the path of a swarm: every update goes through the run's codecs and a blob store."""

    def __init__(
        self,
        config: RunConfig,
        store: BlobStore,
        streams: Sequence[TokenStream],
        owners_per_shard: int = 1,
        outer: OuterConfig | None = None,
    ) -> None:
        """`outer`: Nesterov's momentum on psi; None: the mean."""
        owners = owners_of_shards(config.num_shards, len(streams), owners_per_shard)
        self.rounds = (
            TrainingRounds(config, store, streams, owners)
            if outer is None
            else _NesterovRounds(config, store, streams, owners, outer)
        )

    def round(self, num_steps: int) -> None:
        """All train, and all updates are in the cut. Blobs that nothing refers to any more are deleted."""
        rounds = self.rounds
        places = range(len(rounds.trainers))
        for place in places:
            rounds.train(place, num_steps)
        rounds.certify([CutUpdate(peer=place, base_round=rounds.round) for place in places])
        rounds.published.clear()
        named = {*rounds.spec.parts, *(blob for row in rounds.spec.shards for blob, _ in row)}
        for blob in sorted(set(rounds.store.ids()) - named):
            rounds.store.delete(blob)

    def weights(self) -> Weights:
        """What the next round starts from."""
        reader = StartReader(self.rounds.config, self.rounds.store, self.rounds.spec)
        return reader.psi(), reader.starts()


class _NesterovRounds(TrainingRounds):
    """The mean of a part's deltas goes through Nesterov's momentum."""

    def __init__(
        self,
        config: RunConfig,
        store: BlobStore,
        streams: Sequence[TokenStream],
        owners: Mapping[int, Sequence[int]],
        outer: OuterConfig,
    ) -> None:
        self._outer = outer
        self._momentum: dict[int, F64] = {}
        super().__init__(config, store, streams, owners)

    def _part(self, part: int, cut: Sequence[CutUpdate]) -> Digest:
        layout = psi_layout(self.config)
        before = part_from_bytes(layout, part, self.store.read(self.spec.parts[part]))
        mean = part_from_bytes(layout, part, self.store.read(super()._part(part, cut)))
        mean_delta = mean.astype(np.float64) - before.astype(np.float64)
        momentum = self._momentum.get(part, np.zeros_like(mean_delta))
        after, self._momentum[part] = nesterov_step(before, mean_delta, momentum, self._outer)
        return self.store.put(part_to_bytes(after))


class Replicas:
    """Every peer trains everything; deltas are averaged, plainly (FedAvg) or with Nesterov's momentum (DiLoCo). Nothing
    is rounded on the way."""

    def __init__(self, config: RunConfig, streams: Sequence[TokenStream], outer: OuterConfig | None = None) -> None:
        """`outer` None: the mean."""
        self._config = config
        self._outer = outer
        self._trainers = [Trainer(config, stream) for stream in streams]
        self._shards = dict(genesis_shards(config))
        self._psi = initial_psi(config.model, config.seed)
        self._momentum: dict[str, F64] = {}
        self._step = 0
        self._round = 0

    def round(self, num_steps: int) -> None:
        """All train from the same weights."""
        self._round += 1
        trained: list[Tensors] = []
        for trainer in self._trainers:
            trainer.load_start(_start(self._round, self._step, self._psi, self._shards.items(), tuple(self._shards)))
            trainer.train(num_steps)
            tensors = _trained_psi(trainer)
            for shard in self._shards:
                tensors |= trainer.trained(shard)
            trained.append(tensors)
        self._step += num_steps
        for values in (self._psi, *self._shards.values()):
            for name, before in values.items():
                values[name] = self._outer_step(name, before, [tensors[name] for tensors in trained])

    def _outer_step(self, name: str, before: F32, trained: Sequence[F32]) -> F32:
        mean_delta = mean_of(trained) - before.astype(np.float64)
        if self._outer is None:
            return (before.astype(np.float64) + mean_delta).astype(np.float32)
        momentum = self._momentum.get(name, np.zeros_like(mean_delta))
        after, self._momentum[name] = nesterov_step(before, mean_delta, momentum, self._outer)
        return after

    def weights(self) -> Weights:
        """What the next round starts from."""
        return self._psi, iter(self._shards.items())


class Pairs:
    """NoLoCo: every peer has its own psi, averaged with one other peer in each round; experts come from their owners,
    as in SPES. Nothing is rounded on the way. The result is the average of all psi."""

    def __init__(
        self, config: RunConfig, streams: Sequence[TokenStream], owners_per_shard: int, pair: PairConfig
    ) -> None:
        self._config = config
        self._pair = pair
        self._trainers = [Trainer(config, stream) for stream in streams]
        self._owners = owners_of_shards(config.num_shards, len(streams), owners_per_shard)
        self._shards = dict(genesis_shards(config))
        self._slow = [flatten(psi_layout(config), initial_psi(config.model, config.seed)) for _ in streams]
        self._velocity = [np.zeros(slow.shape, dtype=np.float64) for slow in self._slow]
        self._step = 0
        self._round = 0

    def round(self, num_steps: int) -> None:
        """All train, each from its own psi and the experts of all."""
        self._round += 1
        layout = psi_layout(self._config)
        fast: list[F32] = []
        for place, trainer in enumerate(self._trainers):
            owned = tuple(shard for shard, owners in self._owners.items() if place in owners)
            psi = unflatten(layout, self._slow[place])
            trainer.load_start(_start(self._round, self._step, psi, self._shards.items(), owned))
            trainer.train(num_steps)
            fast.append(flatten(layout, _trained_psi(trainer)))
        self._step += num_steps
        for shard, owners in self._owners.items():
            values = [self._trainers[place].trained(shard) for place in owners]
            self._shards[shard] = {
                name: mean_of([value[name] for value in values]).astype(np.float32) for name in values[0]
            }
        for pair in pairs_of(len(fast), self._config.seed, self._round):
            slow, velocity = pair_step(
                [self._slow[place] for place in pair],
                [fast[place] for place in pair],
                [self._velocity[place] for place in pair],
                self._pair,
            )
            for place, own_slow, own_velocity in zip(pair, slow, velocity, strict=True):
                self._slow[place], self._velocity[place] = own_slow, own_velocity

    def weights(self) -> Weights:
        """The average of all psi, and the experts."""
        psi = unflatten(psi_layout(self._config), mean_of(self._slow).astype(np.float32))
        return psi, iter(self._shards.items())


def genesis_shards(config: RunConfig) -> Iterator[tuple[int, Tensors]]:
    """The genesis values of every shard, in fp32."""
    for shard in range(config.num_shards):
        yield shard, initial_shard(config.model, config.experts_per_shard, config.seed, shard)


def _start(
    number: int, step: int, psi: Tensors, shards: Iterable[tuple[int, Tensors]], owned: tuple[int, ...]
) -> RoundStart:
    return RoundStart(round=number, global_step=step, psi=psi, shards=shards, owned=owned)


def _trained_psi(trainer: Trainer) -> Tensors:
    return {name: to_numpy(weight) for name, weight in trainer.model.psi().items()}
