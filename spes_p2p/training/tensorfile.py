"""Tensors as bytes: safetensors in one canonical form, so that equal tensors are equal bytes.

The form: an 8-byte little-endian header length; a JSON header without spaces whose entries stand in the order of the
specs, without metadata, filled up with spaces to a multiple of 8 bytes; then the tensors in that order, little-endian,
without gaps. A reader knows names, dtypes and shapes before it sees the bytes, makes the only header they can have, and
compares. Nothing of a sender's header is ever parsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from spes_p2p.errors import SchemaError
from spes_p2p.training.arrays import Bytes

DtypeName: TypeAlias = Literal["F32", "BF16", "I8"]

RAW_DTYPES: dict[DtypeName, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
}
"""How each safetensors dtype lies in numpy. numpy has no bfloat16: its bits are held as unsigned integers."""


class TensorSpec(NamedTuple):
    """What a tensor must be."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values alone."""
        return math.prod(self.shape) * RAW_DTYPES[self.dtype].itemsize


def header_of(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header, its length in front, of a file of these tensors."""
    entries: dict[str, Mapping[str, object]] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for spec in specs:
        end = at + spec.size_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded


def file_size_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the whole file."""
    return len(header_of(specs)) + sum(spec.size_bytes for spec in specs)


def encode_tensors(specs: Sequence[TensorSpec], arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    """Bytes of `arrays`, one for each spec, in order. Raises SchemaError if one has another dtype or shape."""
    pieces: list[Bytes] = [header_of(specs)]
    for spec, array in zip(specs, arrays, strict=True):
        if array.shape != spec.shape or array.dtype != RAW_DTYPES[spec.dtype]:
            raise SchemaError(f"{spec.name}: {array.dtype} {array.shape} is not {spec.dtype} {spec.shape}")
        pieces.append(np.ascontiguousarray(array).data.cast("B"))
    return b"".join(pieces)


def decode_tensors(specs: Sequence[TensorSpec], data: Bytes) -> dict[str, npt.NDArray[Any]]:
    """Read-only views into `data`, by name, as RAW_DTYPES has them. Raises SchemaError for any other form."""
    view = memoryview(data).cast("B").toreadonly()
    header = header_of(specs)
    expected_bytes = len(header) + sum(spec.size_bytes for spec in specs)
    if len(view) != expected_bytes:
        raise SchemaError(f"{len(view)} bytes instead of {expected_bytes}")
    if view[: len(header)] != header:
        raise SchemaError("names, dtypes, shapes or order of the tensors are not those of the run")
    arrays = {}
    at = len(header)
    for spec in specs:
        end = at + spec.size_bytes
        arrays[spec.name] = np.frombuffer(view[at:end], dtype=RAW_DTYPES[spec.dtype]).reshape(spec.shape)
        at = end
    return arrays


def open_tensors(data: Bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Read-only views of all tensors in `data`, by name, and the metadata: for files whose form is not known before.
    The data must lie without gaps. Raises SchemaError for anything else."""
    view = memoryview(data).cast("B").toreadonly()
    header_bytes = int.from_bytes(view[:8], "little")
    try:
        header = msgspec.json.decode(view[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
        unordered = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not a file of tensors: {error}") from error
    arrays = {}
    at = 8 + header_bytes
    for name, entry in sorted(unordered.items(), key=lambda item: item[1].data_offsets):
        end = at + TensorSpec(name, entry.dtype, entry.shape).size_bytes
        if tuple(place + 8 + header_bytes for place in entry.data_offsets) != (at, end) or end > len(view):
            raise SchemaError(f"{name} does not lie where its size says")
        arrays[name] = np.frombuffer(view[at:end], dtype=RAW_DTYPES[entry.dtype]).reshape(entry.shape)
        at = end
    if at != len(view):
        raise SchemaError(f"{len(view)} bytes instead of {at}")
    return arrays, metadata


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a header."""

    dtype: DtypeName
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
