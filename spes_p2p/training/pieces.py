"""From trained weights to the pieces of an update, and from the pieces of a cut to a part's result.

Bytes in, bytes out: who moves pieces around needs to know no more of tensors than this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import SchemaError
from spes_p2p.ids import PeerId
from spes_p2p.training.aggregate import Contribution, part_result
from spes_p2p.training.arrays import F32, Bytes, TensorLoader
from spes_p2p.training.codecs import encode_expert_blob, encode_psi_piece, psi_piece_values
from spes_p2p.training.layout import part_from_bytes, part_to_bytes, psi_layout
from spes_p2p.training.norms import expert_squared_norm, squared_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece:
    """One piece of an update as it travels."""

    index: int
    """Part of psi, or shard."""
    data: bytes
    squared_norm: float
    """Of the decoded delta, in float64; an expert's delta is against the value of its base row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceOfCut:
    """One psi piece that a part is averaged over."""

    peer: PeerId
    data: Bytes
    weight: float
    """Above 0."""
    clip: float = 1.0


def zero_residual(config: RunConfig) -> F32:
    """The residual of a peer that has published nothing: [values of psi] zeros."""
    return np.zeros(psi_layout(config).num_values, dtype=np.float32)


def encode_psi_update(config: RunConfig, delta: F32, residual: F32) -> Iterator[tuple[EncodedPiece, F32]]:
    """Pieces of psi's delta, one part at a time, ascending, each with its part of the new residual.

    delta: trained - start, flat fp32 [values of psi]. residual: likewise, what earlier updates left over. The new
    residual is the concatenation of what comes with the pieces. Raises NotFiniteError, and SchemaError if a shape does
    not fit.
    """
    layout = psi_layout(config)
    size = (layout.num_values,)
    if delta.shape != size or residual.shape != size:
        raise SchemaError(f"delta and residual of psi: {delta.shape} and {residual.shape} instead of {size}")
    for part in range(layout.num_parts):
        where = layout.part_slice(part)
        data, left_over = encode_psi_piece(config.codecs.psi, delta[where], residual[where])
        norm = squared_norm(psi_piece_values(config, part, data))
        yield EncodedPiece(index=part, data=data, squared_norm=norm), left_over


def encode_expert_update(config: RunConfig, shard: int, trained: Mapping[str, F32], base: TensorLoader) -> EncodedPiece:
    """The blob of a shard. `base` gives the tensors of its base row. Raises NotFiniteError, SchemaError."""
    data = encode_expert_blob(config, shard, trained)
    return EncodedPiece(index=shard, data=data, squared_norm=expert_squared_norm(config, shard, data, base))


def aggregate_part(config: RunConfig, part: int, previous: Bytes, pieces: Iterable[PieceOfCut]) -> bytes:
    """A part's result, as bytes, from its previous result and exactly the pieces of the cut, in any order.

    Raises SchemaError, NotFiniteError for a piece that no acker would have acknowledged, ValueError without pieces.
    """
    contributions = [
        Contribution(
            peer=piece.peer,
            delta=psi_piece_values(config, part, piece.data),
            weight=piece.weight,
            clip=piece.clip,
        )
        for piece in pieces
    ]
    before = part_from_bytes(psi_layout(config), part, previous)
    return part_to_bytes(part_result(before, contributions, config.protocol.robust, config.training.outer))
