"""What an acker checks of a piece before it acknowledges it: pure functions of the piece and what its sender stated."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import NotFiniteError, SchemaError
from spes_p2p.training.arrays import Bytes, TensorLoader
from spes_p2p.training.codecs import expert_values, open_expert_blob, psi_piece_values
from spes_p2p.training.norms import expert_squared_norm, norms_agree, squared_norm


class PieceRefusal(IntEnum):
    """Objective reasons to refuse a piece: every honest peer comes to the same one. The numbers travel."""

    SCHEMA = 1
    """Not the run's form: names, dtypes, shapes, size, or a code that the codec does not make."""
    NOT_FINITE = 2
    NORM_MISMATCH = 3
    """The stated norm is not that of the bytes."""
    NORM_BOUND = 4
    """The norm is above the bound of the round."""
    MISSING = 5
    """No bytes."""
    BASE_ROW = 6
    """The piece names another base than the certified row."""


def check_psi_piece(
    config: RunConfig, part: int, data: Bytes, stated_squared_norm: float, max_squared_norm: float | None = None
) -> PieceRefusal | None:
    """Reason to refuse one psi part of an update, or None. Without `max_squared_norm` there is no bound."""
    try:
        values = psi_piece_values(config, part, data)
    except SchemaError:
        return PieceRefusal.SCHEMA
    except NotFiniteError:
        return PieceRefusal.NOT_FINITE
    return _check_norm(squared_norm(values), stated_squared_norm, max_squared_norm)


def check_expert_blob(
    config: RunConfig,
    shard: int,
    data: Bytes,
    base: TensorLoader,
    stated_squared_norm: float,
    max_squared_norm: float | None = None,
) -> PieceRefusal | None:
    """Reason to refuse an expert-shard blob, or None. `base` gives the tensors of the row that the blob names.

    Without `max_squared_norm` there is no bound.
    """
    try:
        raw_tensors = open_expert_blob(config, shard, data)
    except SchemaError:
        return PieceRefusal.SCHEMA
    if not all(np.isfinite(expert_values(raw)).all() for raw in raw_tensors.values()):
        return PieceRefusal.NOT_FINITE
    own = expert_squared_norm(config, shard, data, base)
    return _check_norm(own, stated_squared_norm, max_squared_norm)


def _check_norm(own: float, stated: float, bound: float | None) -> PieceRefusal | None:
    if not norms_agree(stated, own):
        return PieceRefusal.NORM_MISMATCH
    # Against the bound it is the stated norm that counts: two ackers may differ in the last digit of their own.
    if bound is not None and stated > bound:
        return PieceRefusal.NORM_BOUND
    return None
