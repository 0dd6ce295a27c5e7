"""The weights a run begins with, as blobs: part results of psi and one blob per expert shard, in the run's codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spes_p2p.config import RunConfig
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.ports import BlobStore
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.codecs import encode_expert_blob
from spes_p2p.training.layout import first_state, flatten, part_to_bytes, psi_layout
from spes_p2p.training.start import StartSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Genesis:
    """Blob ids of a run's first state."""

    parts: tuple[Digest, ...]
    """Part results of psi, in order."""
    shards: tuple[Digest, ...]
    """One blob for each expert shard, in order."""


def make_genesis(config: RunConfig, store: BlobStore) -> Genesis:
    """Make the genesis weights from the run's seed and put them into `store`: the same blobs on every call."""
    return put_weights(
        config,
        store,
        initial_psi(config.model, config.seed),
        lambda shard: initial_shard(config.model, config.experts_per_shard, config.seed, shard),
    )


def put_weights(
    config: RunConfig, store: BlobStore, psi: Mapping[str, F32], load_shard: Callable[[int], Tensors]
) -> Genesis:
    """Put given weights into `store` as a run's first state. Raises SchemaError, NotFiniteError, MachineError."""
    layout = psi_layout(config)
    flat = flatten(layout, psi)
    states = (first_state(layout, flat[layout.part_slice(part)]) for part in range(layout.num_parts))
    parts = tuple(store.put(part_to_bytes(state)) for state in states)
    shards = tuple(
        store.put(encode_expert_blob(config, shard, load_shard(shard))) for shard in range(config.num_shards)
    )
    return Genesis(parts=parts, shards=shards)


def genesis_start(genesis: Genesis) -> StartSpec:
    """What training would start from at genesis: no merge, and no tokens behind any row."""
    return StartSpec(
        round=RoundNumber(0),
        global_step=0,
        parts=genesis.parts,
        shards=tuple(((blob, 0),) for blob in genesis.shards),
    )
