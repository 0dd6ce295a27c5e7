"""A shard handed to its next owner: masters and moments, in one canonical form that is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import NotFiniteError, SchemaError
from spes_p2p.model.shards import shard_tensor_names
from spes_p2p.training.arrays import F32, Bytes, Tensors, require_finite
from spes_p2p.training.codecs import handover_specs
from spes_p2p.training.moments import Moments
from spes_p2p.training.own_work import carried_master
from spes_p2p.training.tensorfile import decode_tensors, encode_tensors
from spes_p2p.training.trainer import Trainer

BF16_HALF_ULP = np.float32(2.0**-8)
"""Largest relative error of rounding to bf16, which keeps 8 significant bits."""
BF16_SMALLEST = np.float32(2.0**-133)
"""The smallest bf16 above zero."""
MAX_STEPS = 1 << 24
"""Step counts travel in fp32, which holds integers up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What the leaving owner of one shard gives."""

    masters: Tensors
    moments: Mapping[str, Moments]
    """Of every tensor of the shard."""


def export_handover(trainer: Trainer, shard: int) -> bytes:
    """Masters and moments of an owned shard, as safetensors bytes. Raises ValueError for a shard of others."""
    masters = trainer.trained(shard)
    moments = trainer.engine.moments(masters)
    arrays: list[F32] = []
    for name, master in masters.items():
        zeros = np.zeros_like(master)
        known = moments.get(name) or Moments(mean=zeros, square=zeros, num_steps=0)
        arrays += [master, known.mean, known.square, np.array([min(known.num_steps, MAX_STEPS)], dtype=np.float32)]
    return encode_tensors(handover_specs(trainer.config, shard), arrays)


def read_handover(config: RunConfig, shard: int, data: Bytes, row: Mapping[str, F32]) -> Handover:
    """Check a hand-over against the certified values of the shard (`row`, before any merge).

    Raises SchemaError for another form, a negative second moment, a step count that is none, or a master further than
    one rounding of the expert codec from the row, and NotFiniteError for a value that is not finite.
    """
    arrays = decode_tensors(handover_specs(config, shard), data)
    masters: Tensors = {}
    moments: dict[str, Moments] = {}
    for name in shard_tensor_names(config.model, config.experts_per_shard, shard):
        master, mean = arrays[f"master/{name}"].copy(), arrays[f"mean/{name}"].copy()
        square, steps = arrays[f"square/{name}"].copy(), float(arrays[f"steps/{name}"][0])
        for values in (master, mean, square):
            require_finite(values, name)
        if (square < 0).any():
            raise SchemaError(f"{name}: a second moment is negative")
        if not (0 <= steps <= MAX_STEPS and steps.is_integer()):
            raise SchemaError(f"{name}: {steps} is not a number of steps")
        if not _within_one_rounding(config, master, row[name]):
            raise SchemaError(f"{name}: the master is not what was published")
        masters[name] = master
        moments[name] = Moments(mean=mean, square=square, num_steps=int(steps))
    return Handover(masters=masters, moments=moments)


def import_handover(trainer: Trainer, shard: int, data: Bytes, row: Mapping[str, F32]) -> str | None:
    """Take over a shard right after the `load_start` that gave it: master := start + (handed master - row), with the
    handed moments. Returns None, or why it was refused: then start and zero moments stay."""
    try:
        handover = read_handover(trainer.config, shard, data, row)
    except (SchemaError, NotFiniteError) as error:
        return str(error)
    start = trainer.trained(shard)
    rest = {name: np.subtract(master, row[name], dtype=np.float32) for name, master in handover.masters.items()}
    trainer.engine.load(carried_master(start, rest))
    trainer.engine.load_moments(handover.moments)
    return None


def _within_one_rounding(config: RunConfig, master: F32, row: F32) -> bool:
    if config.codecs.expert == "fp32":
        return bool(np.array_equal(master, row))
    bound = np.maximum(np.abs(master), np.abs(row)) * BF16_HALF_ULP + BF16_SMALLEST
    return bool((np.abs(master - row) <= bound).all())
