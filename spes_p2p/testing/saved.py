"""What autograd keeps between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], held_anyway: Iterable[Tensor]) -> int:
    """Bytes of the memory that autograd saves while `forward` runs, each block counted once, but for the blocks of
    `held_anyway`, such as weights."""
    blocks: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no block is freed and its address used again
    known = {tensor.untyped_storage().data_ptr() for tensor in held_anyway}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            blocks[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_result = forward()
    del kept_result
    return sum(blocks.values())
