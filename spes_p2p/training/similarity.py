"""Which experts are most alike: the lists of the merge warm-up. Outside the bit rules.

    A_jk = cos(w_in_j, w_in_k), k != j, w_in = the gate matrix
    Q_j  = indices of the K largest A_jk; ties go to the lower index

A cosine may round differently on other hardware, so the lists travel with the certificate, and a verifier accepts a
list whose smallest chosen A is no more than 1e-6 below the largest A that it could have chosen instead.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import SchemaError
from spes_p2p.model.shards import expert_name
from spes_p2p.training.arrays import F64, U16, Bytes, TensorLoader

RANK_TOLERANCE = 1e-6
TIE_DECIMALS = 12
"""Cosines are rounded to this many decimals before they are ranked, so that equal experts tie in spite of rounding."""

_COLUMNS_AT_ONCE = 1 << 16
_LIST_DTYPE = np.dtype("<u2")


def lists_shape(config: RunConfig) -> tuple[int, int, int]:
    """[layers, experts, K], K at most experts - 1."""
    num_experts = config.model.num_experts
    return config.model.num_layers, num_experts, min(config.training.merge.top_k, num_experts - 1)


def layer_cosines(config: RunConfig, layer: int, load: TensorLoader) -> F64:
    """Cosines [M, M] of the gate matrices of one layer, as a normalised Gram matrix in float64.

    A matrix of zeros has cosine 0 with every other.
    """
    num_experts = config.model.num_experts
    rows = [load(expert_name(layer, expert, "gate")).reshape(-1) for expert in range(num_experts)]
    gram = np.zeros((num_experts, num_experts), dtype=np.float64)
    for at in range(0, rows[0].size, _COLUMNS_AT_ONCE):
        columns = np.stack([row[at : at + _COLUMNS_AT_ONCE] for row in rows]).astype(np.float64)
        gram += columns @ columns.T
    lengths = np.sqrt(np.diagonal(gram))
    lengths = np.where(lengths == 0, 1.0, lengths)
    cosines: F64 = gram / np.outer(lengths, lengths)
    return cosines


def rank_most_similar(cosines: F64, num_chosen: int) -> U16:
    """[M, M] cosines -> [M, K] indices of the K most similar others, the most similar first."""
    ranked = -np.round(cosines, TIE_DECIMALS)
    np.fill_diagonal(ranked, np.inf)
    return np.argsort(ranked, axis=1, kind="stable")[:, :num_chosen].astype(np.uint16)


def merge_lists(config: RunConfig, load: TensorLoader) -> U16:
    """Lists Q [layers, experts, K] from unmerged values, read one layer at a time."""
    num_layers, _, num_chosen = lists_shape(config)
    return np.stack([rank_most_similar(layer_cosines(config, layer, load), num_chosen) for layer in range(num_layers)])


def encode_lists(lists: U16) -> bytes:
    """Little-endian uint16, in memory order; the shape follows from the run's configuration."""
    return lists.astype(_LIST_DTYPE, copy=False).tobytes()


def decode_lists(config: RunConfig, data: Bytes) -> U16:
    """Inverse of `encode_lists`. Raises SchemaError unless every list has K distinct experts other than its own."""
    num_layers, num_experts, num_chosen = shape = lists_shape(config)
    view = memoryview(data).cast("B").toreadonly()
    expected_bytes = num_layers * num_experts * num_chosen * _LIST_DTYPE.itemsize
    if len(view) != expected_bytes:
        raise SchemaError(f"merge lists: {len(view)} bytes instead of {expected_bytes}")
    lists = np.frombuffer(view, dtype=_LIST_DTYPE).reshape(shape)
    if num_chosen == 0:
        return lists
    if lists.max() >= num_experts:
        raise SchemaError(f"merge lists: expert {lists.max()} of {num_experts}")
    ascending = np.sort(lists, axis=2)
    if (ascending[:, :, 1:] == ascending[:, :, :-1]).any():
        raise SchemaError("merge lists: an expert stands twice in one list")
    if (lists == np.arange(num_experts, dtype=np.uint16)[np.newaxis, :, np.newaxis]).any():
        raise SchemaError("merge lists: an expert is its own donor")
    return lists


def lists_problem(config: RunConfig, data: Bytes, load: TensorLoader) -> str | None:
    """Why these merge lists are not acceptable for the unmerged values that `load` gives; None if they are."""
    try:
        lists = decode_lists(config, data)
    except SchemaError as error:
        return str(error)
    num_chosen = lists.shape[2]
    if num_chosen in (0, config.model.num_experts - 1):
        return None
    for layer in range(lists.shape[0]):
        cosines = layer_cosines(config, layer, load)
        np.fill_diagonal(cosines, -np.inf)
        chosen = np.take_along_axis(cosines, lists[layer].astype(np.intp), axis=1)
        left_out = cosines.copy()
        np.put_along_axis(left_out, lists[layer].astype(np.intp), -np.inf, axis=1)
        short = chosen.min(axis=1) < left_out.max(axis=1) - RANK_TOLERANCE
        if short.any():
            return f"merge lists: layer {layer}, expert {int(np.argmax(short))}: a more similar expert is left out"
    return None
