"""Types of the arrays that the agreed numerics hand around, and the values that all of their files need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spes_p2p.errors import NotFiniteError

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I8: TypeAlias = npt.NDArray[np.int8]
U16: TypeAlias = npt.NDArray[np.uint16]
Bytes: TypeAlias = bytes | bytearray | memoryview

Tensors: TypeAlias = dict[str, F32]
"""fp32 tensors by parameter name (model.shards)."""

TensorLoader: TypeAlias = Callable[[str], F32]
"""Parameter name -> fp32 tensor; lets a caller read one tensor at a time."""


def require_finite(values: npt.NDArray[Any], what: str) -> None:
    """Raise NotFiniteError if any element of `values` is NaN or infinite."""
    if not np.isfinite(values).all():
        raise NotFiniteError(f"{what}: not finite")
