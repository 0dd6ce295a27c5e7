"""Memory that glibc's allocator keeps although nothing uses it, given back while a model is computed on a CPU.

Blocks of up to 32 MiB come from one heap, and a small block that lives long often lies in the middle of a large hole,
which is then too small for the next large block. Each layer leaves some such holes; over a step they grew to a quarter
of all that was in use (docs/LOG.md). The pages of holes can be returned at any time: they come back, zeroed, if the
hole is used after all, which costs about 2 us for each 4 KiB. So it is done once per layer, where memory is near its
most.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

WORTH_BYTES = 1 << 20
"""Below this size of a layer's output the holes do not matter."""


def give_holes_back(x: Tensor) -> None:
    """Return the pages of holes now, and again when the gradient of this layer output is known: both are moments at
    which temporary blocks have just been freed. Nothing is done for small models, on GPUs, and without glibc."""
    trim = _trim()
    if trim is None or x.is_cuda or x.nbytes < WORTH_BYTES:
        return
    trim()
    if x.requires_grad:
        x.register_hook(lambda grad: trim())  # type: ignore[no-untyped-call]  # untyped in torch


def give_all_holes_back() -> None:
    """The same at the end of a piece of work, whatever its size."""
    trim = _trim()
    if trim is not None:
        trim()


@functools.cache
def _trim() -> Callable[[], None] | None:
    """glibc's malloc_trim for all of the heap; None where there is no glibc."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int

    def trim() -> None:
        function(0)

    return trim
