"""A trained round as the pieces of an update, in a blob store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spes_p2p.ids import Digest
from spes_p2p.ports import BlobStore
from spes_p2p.training.arrays import TensorLoader, Tensors
from spes_p2p.training.codecs import expert_values, open_expert_blob
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.own_work import PendingUpdate
from spes_p2p.training.pieces import encode_expert_update, encode_psi_update
from spes_p2p.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """One piece of an update that lies in the store."""

    index: int
    """Part of psi, or shard."""
    blob: Digest
    size_bytes: int
    squared_norm: float
    """Of the decoded delta, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUpdate:
    """All pieces of one update."""

    psi: tuple[StoredPiece, ...]
    experts: tuple[StoredPiece, ...]


def publish(trainer: Trainer, store: BlobStore, base: TensorLoader) -> StoredUpdate:
    """Encode psi's delta and the own shards, put the pieces into the store, and note what the codecs left over.

    `base` gives tensors of the certified rows by name (before any merge). Raises NotFiniteError if weights are not
    finite, MachineError when the disk is full; nothing is noted then.
    """
    config, residual = trainer.config, trainer.work.residual
    layout = psi_layout(config)
    delta = trainer.flat_delta_psi()
    psi: list[StoredPiece] = []
    left_over = np.empty_like(delta)
    for piece, rest in encode_psi_update(config, delta, residual):
        psi.append(_store(store, piece.index, piece.data, piece.squared_norm))
        left_over[layout.part_slice(piece.index)] = rest

    experts: list[StoredPiece] = []
    remainders: dict[int, Tensors] = {}
    for shard in trainer.owned:
        trained = trainer.trained(shard)
        piece = encode_expert_update(config, shard, trained, base)
        experts.append(_store(store, shard, piece.data, piece.squared_norm))
        for name, raw in open_expert_blob(config, shard, piece.data).items():
            # the copy of the trained values becomes what rounding took from them
            np.subtract(trained[name], expert_values(raw), out=trained[name])
        remainders[shard] = trained

    wanted = np.add(delta, residual, out=delta)
    trainer.published(PendingUpdate(wanted=wanted, left_over=left_over, remainders=remainders))
    return StoredUpdate(psi=tuple(psi), experts=tuple(experts))


def _store(store: BlobStore, index: int, data: bytes, squared_norm: float) -> StoredPiece:
    return StoredPiece(index=index, blob=store.put(data), size_bytes=len(data), squared_norm=squared_norm)
