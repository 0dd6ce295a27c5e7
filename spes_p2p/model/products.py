"""fp32 matrix products on a CPU, by the faster of the two libraries that PyTorch brings along.

`torch.mm` asks MKL, which on AMD processors does not use vectors of 512 bits and so reaches less than half of what
those with AVX-512 can do; oneDNN does use them (docs/LOG.md has the figures). PyTorch calls oneDNN for fp32 in one
place only: the linear operator of compiled models. That operator takes any two matrices, transposed views too, and
gives a new one. It makes code for each new shape, which takes as long as a small product: so small products stay with
`torch.mm`, and whoever has many sizes rounds them up with `padded`.

Which library is asked depends on the machine and the shapes alone, never on a measurement: a process that is started
again computes the same bits. Under autocast, on GPUs and for other types everything is `torch.mm`.
"""

from __future__ import annotations

import functools
import mmap
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 1 << 22
"""Multiplications of the smallest product that is worth a call of oneDNN."""
TILE_BYTES = 4 << 20
"""Most of a new result that is only copied or added to where it belongs."""
ADDED_BYTES = 64 << 20
"""Most of a product in bf16 that is made to be added to an fp32 sum."""
PAD_ROWS = 32
"""Sizes that vary are rounded up to a multiple of this, or of a sixteenth of the power of two below them if that is
more: code for a shape is kept, so there must not be too many."""
LIBRARY_BYTES = 50 << 20
"""What oneDNN comes to hold for code and its own work: between nothing and 150 MB, by shapes (docs/memory.md)."""
ROOM_BYTES = 4 << 20
"""What must be left beside the result for a call of oneDNN: it does not look whether it got the few kilobytes that it
makes code with, and ends the process if it did not."""
_PRIVATE: dict[str, Any] = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""Shared memory is not counted where a limit on a process's data is."""
_NO_CODE = "could not create a primitive"
"""What oneDNN says if it cannot make code for a shape."""


def takes(like: Tensor) -> bool:
    """Whether products of this tensor, if they are large enough, are oneDNN's."""
    return not like.is_cuda and like.dtype == torch.float32 and _onednn_is_faster()


def library_bytes() -> int:
    """Memory that the library takes beside matrices, once it has computed for a while."""
    return LIBRARY_BYTES if _onednn_is_faster() else 0


def padded(size: int, like: Tensor) -> int:
    """The number of rows to compute with, where `size` are needed: more only if oneDNN computes."""
    if not takes(like):
        return size
    step = max(PAD_ROWS, 1 << size.bit_length() >> 5)
    return -(-size // step) * step


def product(left_MK: Tensor, right_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, without a gradient. With `out` the result is written there; it may have fewer rows than `left`,
    whose last ones are then only padding."""
    if not _is_worth_it(left_MK, right_KN):
        return torch.mm(left_MK if out is None else left_MK[: len(out)], right_KN, out=out)
    if out is None:
        return _by_onednn(left_MK, right_KN)
    if right_KN.T.is_contiguous():
        for columns in _tiles(right_KN.shape[1], left_MK.shape[0]):
            out[:, columns] = _by_onednn(left_MK, right_KN[:, columns])[: len(out)]
    else:
        for rows in _tiles(left_MK.shape[0], right_KN.shape[1]):
            wanted = out[rows]
            wanted.copy_(_by_onednn(left_MK[rows], right_KN)[: len(wanted)])
    return out


def add_product_(into_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """into += left @ right, without a gradient."""
    if not _is_worth_it(left_MK, right_KN):
        if into_MN.dtype == left_MK.dtype:
            return into_MN.addmm_(left_MK, right_KN)
        # a narrower product exists before it is added: never all of it
        num_rows = max(1, ADDED_BYTES // (right_KN.shape[1] * left_MK.element_size()))
        pieces = zip(into_MN.split(num_rows), left_MK.split(num_rows), strict=True)  # type: ignore[no-untyped-call]  # untyped in torch
        for into, left in pieces:
            into.add_(left @ right_KN)
        return into_MN
    tiles = _tiles(left_MK.shape[0], right_KN.shape[1])
    scratch = left_MK.new_empty(left_MK[tiles[0]].numel())
    for rows in tiles:
        part_KM = left_MK[rows].T
        if len(tiles) > 1 and left_MK.stride(0) == 1:
            # columns of a wide matrix: their gaps would make oneDNN's own copy slow
            part_KM = scratch[: part_KM.numel()].view(part_KM.shape).copy_(part_KM)
        into_MN[rows] += _by_onednn(part_KM.T, right_KN)
    return into_MN


def _by_onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    # Code for a new shape lies in memory of its own, of which a limit may have left none although the heap, where
    # results lie, has room: the attempt would fail in smaller pieces as well.
    if not _has_room(left_MK, right_KN.shape[1]):
        return left_MK @ right_KN
    try:
        return _onednn(left_MK, right_KN)
    except RuntimeError as error:
        if _NO_CODE not in str(error):
            raise
        return left_MK @ right_KN


def _has_room(left_MK: Tensor, num_columns: int) -> bool:
    """Whether there is more room than for the result. Raises what PyTorch's allocator raises if there is none for that.

    What is allocated here is given back at once and never touched, so that it costs some microseconds.
    """
    held = left_MK.new_empty(left_MK.shape[0], num_columns)
    try:
        mmap.mmap(-1, ROOM_BYTES, **_PRIVATE).close()
    except OSError:
        return False
    del held
    return True


def _onednn(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    result_MN: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_KN.T, None, "none", [], "")
    return result_MN


def _tiles(size: int, other_size: int) -> list[slice]:
    """Cuts one dimension of a result so that what oneDNN gives at once stays in the processor's cache."""
    step = max(1, TILE_BYTES // (4 * other_size))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


class Linear(nn.Linear):
    """x @ weight^T, without a bias, by the faster library."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if input.is_cuda or torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight)
        if not takes(self.weight):
            return F.linear(input, self.weight)
        y: Tensor = _Linear.apply(input, self.weight)  # type: ignore[no-untyped-call]  # untyped in torch
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_ND)
        return product(x.flatten(0, -2), weight_ND.T).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_ND = ctx.saved_tensors
        grad_TN = grads[0].flatten(0, -2)
        return product(grad_TN, weight_ND).view_as(x), product(grad_TN.T, x.flatten(0, -2))


def _is_worth_it(left_MK: Tensor, right_KN: Tensor) -> bool:
    # for a right side with gaps between its rows oneDNN has nothing but its slow reference
    dense = right_KN.is_contiguous() or right_KN.T.is_contiguous()
    return dense and takes(left_MK) and left_MK.shape[0] * right_KN.numel() >= SMALLEST


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether this is an AMD processor with AVX-512, and both libraries are there and work."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # untyped in torch
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # the same
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _processor()
        and _onednn_works()
    )


def _onednn_works() -> bool:
    """Whether it may make code: not where the system forbids processes to."""
    try:
        _onednn(torch.ones(PAD_ROWS, PAD_ROWS), torch.ones(PAD_ROWS, PAD_ROWS))
    except (AttributeError, RuntimeError):  # no such operator in this build, or it failed
        return False
    return True


def _processor() -> str:
    """What the system says of its processor, the vendor among it."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
