"""The ways to train that an experiment compares: each makes rounds, and has weights that can be evaluated.

N peers, H inner steps of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.digests import digest
from spes_p2p.ids import RunId
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.model.transformer import to_numpy
from spes_p2p.ports import BlobStore
from spes_p2p.training.arrays import F32, F64, Tensors
from spes_p2p.training.data import TokenStream
from spes_p2p.training.lab.rounds import CutUpdate, TrainingRounds, peer_of
from spes_p2p.training.lab.streams import joined
from spes_p2p.training.layout import PartState, flatten, psi_layout, unflatten
from spes_p2p.training.noloco import NoLoCoConfig, Replica, pair_step, pairs
from spes_p2p.training.outer import outer_step
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
    ) -> None:
        owners = owners_of_shards(config.num_shards, len(streams), owners_per_shard)
        self.rounds = TrainingRounds(config, store, streams, owners)

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


class Replicas:
    """Every peer trains everything; deltas are averaged and take the run's outer step: FedAvg with `mean`, DiLoCo with
    `nesterov`. Nothing is rounded on the way."""

    def __init__(self, config: RunConfig, streams: Sequence[TokenStream]) -> None:
        self._config = config
        self._trainers = [Trainer(config, stream) for stream in streams]
        begins_at_rest = config.training.outer.has_momentum

        def first(tensors: Tensors) -> dict[str, PartState]:
            return {
                name: PartState(psi=values, momentum=np.zeros_like(values) if begins_at_rest else None)
                for name, values in tensors.items()
            }

        self._psi = first(initial_psi(config.model, config.seed))
        self._shards = {shard: first(tensors) for shard, tensors in genesis_shards(config)}
        self._step = 0
        self._round = 0

    def round(self, num_steps: int) -> None:
        """All train from the same weights."""
        self._round += 1
        trained: list[Tensors] = []
        for trainer in self._trainers:
            trainer.load_start(_start(self._round, self._step, *self.weights(), tuple(self._shards)))
            trainer.train(num_steps)
            tensors = _trained_psi(trainer)
            for shard in self._shards:
                tensors |= trainer.trained(shard)
            trained.append(tensors)
        self._step += num_steps
        outer = self._config.training.outer
        for states in (self._psi, *self._shards.values()):
            for name, before in states.items():
                mean_delta = mean_of([tensors[name] for tensors in trained]) - before.psi.astype(np.float64)
                states[name] = outer_step(outer, before, mean_delta)

    def weights(self) -> Weights:
        """What the next round starts from."""
        return _values(self._psi), ((shard, _values(states)) for shard, states in self._shards.items())


class Pairs:
    """NoLoCo: every peer has its own psi, averaged with one other peer in each round; experts come from their owners,
    as in SPES. Nothing is rounded on the way. The result is the average of all psi."""

    def __init__(
        self, config: RunConfig, streams: Sequence[TokenStream], owners_per_shard: int, pair: NoLoCoConfig
    ) -> None:
        self._config = config
        self._pair = pair
        self._trainers = [Trainer(config, stream) for stream in streams]
        self._owners = owners_of_shards(config.num_shards, len(streams), owners_per_shard)
        self._shards = dict(genesis_shards(config))
        first = flatten(psi_layout(config), initial_psi(config.model, config.seed))
        self._replicas = [Replica(velocity=np.zeros_like(first), slow=first, fast=first) for _ in streams]
        self._step = 0
        self._round = 0

    def round(self, num_steps: int) -> None:
        """All train, each from its own psi and the experts of all."""
        self._round += 1
        layout = psi_layout(self._config)
        for place, trainer in enumerate(self._trainers):
            owned = tuple(shard for shard, owners in self._owners.items() if place in owners)
            replica = self._replicas[place]
            psi = unflatten(layout, replica.fast)
            trainer.load_start(_start(self._round, self._step, psi, self._shards.items(), owned))
            trainer.train(num_steps)
            self._replicas[place] = replace(replica, fast=flatten(layout, _trained_psi(trainer)))
        self._step += num_steps
        for shard, owners in self._owners.items():
            values = [self._trainers[place].trained(shard) for place in owners]
            self._shards[shard] = {
                name: mean_of([value[name] for value in values]).astype(np.float32) for name in values[0]
            }
        run = RunId(digest("spes lab run", self._config.seed))
        places = {peer_of(place): place for place in range(len(self._replicas))}
        for one, other in pairs(run, self._round, tuple(places)):
            at, beside = places[one], places[other]
            self._replicas[at], self._replicas[beside] = pair_step(
                self._pair, self._replicas[at], self._replicas[beside]
            )

    def weights(self) -> Weights:
        """The average of all psi, and the experts."""
        psi = unflatten(psi_layout(self._config), mean_of([one.slow for one in self._replicas]).astype(np.float32))
        return psi, iter(self._shards.items())


def mean_of(vectors: Sequence[F32]) -> F64:
    """Mean of equally weighted values of one shape."""
    mean: F64 = np.mean(np.stack(vectors), axis=0, dtype=np.float64)
    return mean


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


def _values(states: Mapping[str, PartState]) -> Tensors:
    return {name: state.psi for name, state in states.items()}
