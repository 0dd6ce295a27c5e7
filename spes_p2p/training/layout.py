"""How psi, the shared modules, lies in one flat vector, and how that is cut into parts.

The vector is the concatenation of the tensors of psi, sorted by name, as fp32. The parts are fixed for the run: they
begin at multiples of 256 values (a block of the int8 codec) and are as equal as that allows. A part's result is its
values and, if the run's outer step has momentum, as many values of that.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import SchemaError
from spes_p2p.model.shards import num_psi_values, psi_shapes
from spes_p2p.training.arrays import F32, Bytes, Tensors

BLOCK_VALUES = 256
PART_DTYPE = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class PsiLayout:
    """Where every tensor and every part of psi lies in the flat vector of `num_values` values."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape), sorted by name."""
    bounds: tuple[int, ...]
    """Part p is [bounds[p], bounds[p + 1])."""
    has_momentum: bool = False
    """Whether the outer step has momentum, which lies in a part's result behind psi."""

    @property
    def num_values(self) -> int:
        """Length of the flat vector."""
        return self.bounds[-1]

    @property
    def num_parts(self) -> int:
        """How many parts there are: what the run asks for, or one per block if psi is smaller than that."""
        return len(self.bounds) - 1

    def part_slice(self, part: int) -> slice:
        """Where a part lies. Raises IndexError for a part that the run does not have."""
        if not 0 <= part < self.num_parts:
            raise IndexError(f"part {part} of {self.num_parts}")
        return slice(self.bounds[part], self.bounds[part + 1])

    def part_values(self, part: int) -> int:
        """How many values a part has."""
        where = self.part_slice(part)
        return int(where.stop) - int(where.start)

    def part_size_bytes(self, part: int) -> int:
        """Size of a part's result: the fp32 bytes of psi, and as many of the momentum if there is one."""
        return self.part_values(part) * PART_DTYPE.itemsize * (2 if self.has_momentum else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """What all peers agree on for one part of psi."""

    psi: F32
    """[part_values]"""
    momentum: F32 | None = None
    """[part_values], where psi is heading (training/outer.py); None if the run's outer step has none."""


@functools.lru_cache(maxsize=16)
def psi_layout(config: RunConfig) -> PsiLayout:
    """The layout of a run's psi."""
    shapes = tuple(sorted(psi_shapes(config.model).items()))
    num_values = num_psi_values(config.model)
    num_blocks = -(-num_values // BLOCK_VALUES)
    num_parts = min(config.protocol.parts, num_blocks)
    starts = tuple(part * num_blocks // num_parts * BLOCK_VALUES for part in range(num_parts))
    has_momentum = config.training.outer.has_momentum
    return PsiLayout(shapes=shapes, bounds=(*starts, num_values), has_momentum=has_momentum)


def flatten(layout: PsiLayout, psi: Mapping[str, F32]) -> F32:
    """Flat fp32 copy [num_values]. Raises SchemaError for other names, dtypes or shapes than the layout's."""
    if psi.keys() != {name for name, _ in layout.shapes}:
        raise SchemaError("the names of psi's tensors are not those of the run")
    flat = np.empty(layout.num_values, dtype=np.float32)
    at = 0
    for name, shape in layout.shapes:
        tensor = psi[name]
        if tensor.shape != shape or tensor.dtype != np.float32:
            raise SchemaError(f"{name}: {tensor.dtype} {tensor.shape} is not float32 {shape}")
        flat[at : at + tensor.size] = tensor.reshape(-1)
        at += tensor.size
    return flat


def unflatten(layout: PsiLayout, flat: F32) -> Tensors:
    """Tensors of psi by name, as views into `flat` [num_values]. Raises SchemaError for another length or dtype."""
    if flat.shape != (layout.num_values,) or flat.dtype != np.float32:
        raise SchemaError(f"psi: {flat.dtype} {flat.shape} is not float32 {(layout.num_values,)}")
    sizes = [math.prod(shape) for _, shape in layout.shapes]
    ends = itertools.accumulate(sizes)
    return {
        name: flat[end - size : end].reshape(shape)
        for (name, shape), size, end in zip(layout.shapes, sizes, ends, strict=True)
    }


class PartedTensors(Mapping[str, F32]):
    """Tensors of psi by name out of the values of its parts, [part_values] each. A tensor within one part is a view,
    another one is put together whenever it is asked for: so never more than one of them is copied."""

    def __init__(self, layout: PsiLayout, parts: Sequence[F32]) -> None:
        self._layout = layout
        self._parts = parts
        sizes = [math.prod(shape) for _, shape in layout.shapes]
        ends = itertools.accumulate(sizes)
        self._places = {
            name: (end - size, end, shape) for (name, shape), size, end in zip(layout.shapes, sizes, ends, strict=True)
        }

    def __getitem__(self, name: str) -> F32:
        start, stop, shape = self._places[name]
        bounds = self._layout.bounds
        first, last = bisect.bisect_right(bounds, start) - 1, bisect.bisect_left(bounds, stop) - 1
        pieces = [
            self._parts[part][max(start - bounds[part], 0) : stop - bounds[part]] for part in range(first, last + 1)
        ]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def first_state(layout: PsiLayout, psi: F32) -> PartState:
    """A part's state before any update: psi [part_values] as it is, and no momentum yet, which is zeros."""
    return PartState(psi=psi, momentum=np.zeros_like(psi) if layout.has_momentum else None)


def part_to_bytes(state: PartState) -> bytes:
    """A part's result as bytes: psi, then the momentum if there is one, little-endian fp32. Their blob id is the part's
    digest."""
    arrays = (state.psi,) if state.momentum is None else (state.psi, state.momentum)
    return b"".join(values.astype(PART_DTYPE, copy=False).tobytes() for values in arrays)


def part_from_bytes(layout: PsiLayout, part: int, data: Bytes) -> PartState:
    """A part's result, as read-only views. Raises SchemaError for another size."""
    view = memoryview(data).cast("B").toreadonly()
    if len(view) != layout.part_size_bytes(part):
        raise SchemaError(f"part {part}: {len(view)} bytes instead of {layout.part_size_bytes(part)}")
    values = np.frombuffer(view, dtype=PART_DTYPE)
    num_values = layout.part_values(part)
    return PartState(psi=values[:num_values], momentum=values[num_values:] if layout.has_momentum else None)
