"""Ranks: the devices of one peer that train one model together, one process each.

All ranks do the same things in the same order (the order is rank 0's, see `training.spread`); where their values
meet, they meet in the methods of this file. A rank holds of each tensor the rows that `local_rows` says, which is how
FSDP2 cuts parameters too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEETING_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in one exchange. They come together: rank 0 calls them to each."""


class Ranks(Protocol):
    """Which of how many this is, and what an optimizer and a loss need of the others."""

    index: int
    count: int

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a parameter or gradient: a plain tensor that shares their memory."""
        ...

    def sum(self, *values: float) -> tuple[float, ...]:
        """Sums over all ranks, the same on each."""
        ...


class Alone:
    """One device: it has everything."""

    index = 0
    count = 1

    def local(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def sum(self, *values: float) -> tuple[float, ...]:
        """The values."""
        return values


ALONE = Alone()


class GroupRanks:
    """A rank of a PyTorch process group: NCCL between GPUs, gloo between CPUs. One per process."""

    def __init__(self, index: int, count: int, device: torch.device, meeting_place: Path) -> None:
        """Waits for the others. `meeting_place`: a file that does not exist yet, in a folder that they all see."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.index = index
        self.count = count
        self.device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(meeting_place), count),  # type: ignore[attr-defined]  # torch does not list it
            rank=index,
            world_size=count,
            timeout=MEETING_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        self.mesh: DeviceMesh = init_device_mesh(device.type, (count,))

    def local(self, tensor: Tensor) -> Tensor:
        """See `Ranks`."""
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def sum(self, *values: float) -> tuple[float, ...]:
        """See `Ranks`; summed in float64."""
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def from_first_(self, tensor: Tensor) -> Tensor:
        """Overwrite a contiguous tensor by rank 0's. Returns it."""
        import torch.distributed as dist

        dist.broadcast(tensor, 0)
        return tensor

    def rows(self, num_rows: int) -> slice:
        """Which rows of a tensor are this rank's."""
        return local_rows(num_rows, self.index, self.count)

    def gather(self, local: Tensor, num_rows: int) -> Tensor:
        """The whole tensor [num_rows, ...] from each rank's rows, on every rank."""
        import torch.distributed as dist

        most = -(-num_rows // self.count)
        rows = local.contiguous()
        if len(local) < most:
            rows = local.new_zeros(most, *local.shape[1:])
            rows[: len(local)] = local
        whole = local.new_empty(most * self.count, *local.shape[1:])
        dist.all_gather(list(whole.chunk(self.count)), rows)
        return whole[:num_rows]

    def close(self) -> None:
        """Leave the group: for tests, whose process lives on."""
        import torch.distributed as dist

        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A micro-batch of one rank."""

    rows: slice
    """Its sequences of the batch."""
    counts: bool = True
    """False: it stands in where the rank has no sequence left, and weighs nothing."""


def local_rows(num_rows: int, index: int, count: int) -> slice:
    """The rows of a rank: equal shares, the last ones shorter or empty (as `torch.chunk`)."""
    most = -(-num_rows // count)
    return slice(min(index * most, num_rows), min((index + 1) * most, num_rows))


def parts(num_sequences: int, micro_sequences: int, ranks: Ranks = ALONE) -> Iterator[Part]:
    """A rank's micro-batches of a batch, in order. Every rank has the same number of them: their exchanges meet."""
    mine = local_rows(num_sequences, ranks.index, ranks.count)
    most = local_rows(num_sequences, 0, ranks.count).stop
    for offset in range(0, most, micro_sequences):
        first, last = mine.start + offset, min(mine.start + offset + micro_sequences, mine.stop)
        yield Part(rows=slice(first, last)) if first < last else Part(rows=slice(0, 1), counts=False)


def global_norm(local_norm: float, ranks: Ranks) -> float:
    """Norm of all ranks' values together, from the norm of one's own."""
    if ranks.count == 1:
        return local_norm
    return math.sqrt(ranks.sum(local_norm**2)[0])
