"""The weights a round starts from, rebuilt from blobs: a pure function of the certified state (docs/protocol.md, 7).

psi is its part results, without the momentum that lies there too under `nesterov`. The value of a shard is its row: one
blob, or the mean of its owners'. The start of a shard is that value, merged with its donors' values if the certificate
carries a merge plan and the shard receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from spes_p2p.config import RunConfig
from spes_p2p.errors import BlobError, SchemaError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.model.shards import parse_expert_name, shard_of_expert, shard_tensor_names
from spes_p2p.ports import BlobStore
from spes_p2p.training.aggregate import owners_mean
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.codecs import expert_values, open_expert_blob
from spes_p2p.training.layout import PartedTensors, part_from_bytes, psi_layout, unflatten
from spes_p2p.training.merge import merge_shard
from spes_p2p.training.similarity import decode_lists

Opened = TypeVar("Opened")

NO_BASE = Digest(b"")
"""Of a start that follows from no certificate."""


class StartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Names everything that the start of a round is made of."""

    round: RoundNumber
    """The round whose certificate made this state; the start is that of the round after it."""
    base: Digest = NO_BASE
    """Hash of that certificate: two branches may have one of the same round."""
    global_step: int
    parts: tuple[Digest, ...]
    """Blob ids of psi's part results."""
    shards: tuple[tuple[tuple[Digest, int], ...], ...]
    """For each shard its row: (blob id, tokens) of its owners' blobs, in the order of the table."""
    merge_alpha: float = 0.0
    """0: no merge."""
    merge_lists: bytes = b""
    receivers: tuple[bool, ...] = ()
    """For each shard whether it moves in the merge; empty without a merge."""


class StartReader:
    """Reads the start of a round from a blob store.

    Making one raises SchemaError if the spec does not fit the run. Every method raises BlobError if a blob is missing
    or does not have the run's form.
    """

    def __init__(self, config: RunConfig, store: BlobStore, spec: StartSpec) -> None:
        layout = psi_layout(config)
        if len(spec.parts) != layout.num_parts:
            raise SchemaError(f"{len(spec.parts)} parts instead of {layout.num_parts}")
        if len(spec.shards) != config.num_shards or not all(spec.shards):
            raise SchemaError(f"{len(spec.shards)} rows of shards, none empty, must be {config.num_shards}")
        if spec.merge_alpha != 0 and len(spec.receivers) != config.num_shards:
            raise SchemaError(f"{len(spec.receivers)} receivers instead of {config.num_shards}")
        self._config = config
        self._store = store
        self._spec = spec
        self._opened: dict[int, tuple[dict[str, npt.NDArray[Any]], ...]] = {}

    def part(self, part: int) -> F32:
        """Read-only values of one part of psi."""
        blob = self._spec.parts[part]
        return _open(blob, lambda: part_from_bytes(psi_layout(self._config), part, self._store.read(blob)).psi)

    def psi(self) -> Tensors:
        """The shared modules: writable fp32 tensors by name."""
        layout = psi_layout(self._config)
        return unflatten(layout, np.concatenate([self.part(part) for part in range(layout.num_parts)]))

    def psi_where_it_lies(self) -> Mapping[str, F32]:
        """The shared modules by name, each read from the parts' blobs when it is asked for. They are opened here and
        now, so that they stay readable; blobs that are memory-mapped need no memory of the process."""
        layout = psi_layout(self._config)
        return PartedTensors(layout, [self.part(part) for part in range(layout.num_parts)])

    def row_tensor(self, name: str) -> F32:
        """Value of one expert tensor before the merge; a new array. Raises KeyError if `name` is not an expert's."""
        parsed = parse_expert_name(name)
        if parsed is None:
            raise KeyError(name)
        shard = shard_of_expert(parsed[1], self._config.experts_per_shard)
        values = [expert_values(raw[name]) for raw in self._raw_blobs(shard)]
        return owners_mean(values, [tokens for _, tokens in self._spec.shards[shard]])

    def row(self, shard: int) -> Tensors:
        """Value of a shard before the merge: writable fp32 tensors by name."""
        names = shard_tensor_names(self._config.model, self._config.experts_per_shard, shard)
        return {name: self.row_tensor(name) for name in names}

    def start(self, shard: int) -> Tensors:
        """Value of a shard after the merge: what training starts from. Writable fp32 tensors by name."""
        spec = self._spec
        if spec.merge_alpha == 0 or not spec.receivers[shard]:
            return self.row(shard)
        lists = decode_lists(self._config, spec.merge_lists)
        return merge_shard(self._config, shard, lists, spec.merge_alpha, self.row_tensor)

    def starts(self) -> Iterator[tuple[int, Tensors]]:
        """`start` of every shard, one at a time, ascending."""
        for shard in range(self._config.num_shards):
            yield shard, self.start(shard)

    def _raw_blobs(self, shard: int) -> tuple[dict[str, npt.NDArray[Any]], ...]:
        if shard not in self._opened:
            self._opened[shard] = tuple(self._open_expert(shard, blob) for blob, _ in self._spec.shards[shard])
        return self._opened[shard]

    def _open_expert(self, shard: int, blob: Digest) -> dict[str, npt.NDArray[Any]]:
        return _open(blob, lambda: open_expert_blob(self._config, shard, self._store.read(blob)))


def _open(blob: Digest, read: Callable[[], Opened]) -> Opened:
    try:
        return read()
    except SchemaError as error:
        raise BlobError(f"blob {blob.hex()[:16]}: {error}") from error
