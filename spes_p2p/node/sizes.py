"""Sizes of a run's pieces, which the protocol needs and only the codecs know."""

from __future__ import annotations

from spes_p2p.config import RunConfig
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.training.codecs import expert_blob_specs, handover_specs, psi_piece_specs
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.tensorfile import file_size_bytes

EXPERT_CODECS = {"bf16": 0, "fp32": 1}
PSI_CODECS = {"int8": 0, "fp32": 1}
"""Numbers of the codecs on the wire."""


def psi_piece_bytes(config: RunConfig, part: int) -> int:
    """Exact size of one encoded psi piece."""
    return file_size_bytes(psi_piece_specs(config.codecs.psi, psi_layout(config).part_values(part)))


def expert_blob_bytes(config: RunConfig, shard: int) -> int:
    """Exact size of one expert-shard blob."""
    return file_size_bytes(expert_blob_specs(config, shard))


def handover_bytes(config: RunConfig, shard: int) -> int:
    """Exact size of what a leaver hands over of one shard."""
    return file_size_bytes(handover_specs(config, shard))


def piece_sizes(config: RunConfig) -> PieceSizes:
    """The largest size of each kind of blob, and how many there are."""
    layout = psi_layout(config)
    parts, shards = range(layout.num_parts), range(config.num_shards)
    return PieceSizes(
        expert_blob_bytes=max(expert_blob_bytes(config, shard) for shard in shards),
        psi_piece_bytes=max(psi_piece_bytes(config, part) for part in parts),
        part_result_bytes=max(layout.part_size_bytes(part) for part in parts),
        num_parts=layout.num_parts,
        num_shards=config.num_shards,
    )
