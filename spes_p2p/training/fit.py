"""Choosing what a node can take on, from the memory it has: how many shards to offer, and how to cut its steps.

A shard that nobody owns learns nothing, while a smaller plan only makes steps slower. So a node offers as many shards
as fit at all, and cuts its steps, at each start, as little as the shards that it was really given allow. An explicit
`--capacity` is kept or refused. Pure: what memory there is, is asked elsewhere (node/room.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.errors import MachineError
from spes_p2p.training.memory import MemoryNeed, memory_need
from spes_p2p.training.plan import StepPlan, smaller, whole_batch
from spes_p2p.units import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that training may take, without what the process has already."""

    device_bytes: int
    """Of the GPU, the one with least if there are several; on a CPU of main memory."""
    host_bytes: int | None = None
    """Main memory beside a GPU."""
    of: str = ""
    """Whose it is, for people: such as `of the 8.0 GB of --memory`."""

    def holds(self, need: MemoryNeed) -> bool:
        """Whether it is enough."""
        fits_host = need.host is None or self.host_bytes is None or need.host.peak_bytes <= self.host_bytes
        return need.device.peak_bytes <= self.device_bytes and fits_host


def largest_plan(
    config: RunConfig, node: NodeConfig, num_owned: int, room: Room, failed: StepPlan | None = None
) -> MemoryNeed | None:
    """The need under the fastest plan that fits with so many shards and comes after `failed`, which did not fit when
    it was tried; None: there is no such plan."""
    candidates = plans(config, node.num_ranks)
    if failed is not None:
        candidates = after(failed, candidates)
    needs = (memory_need(config, node, num_owned, plan) for plan in candidates)
    return next((need for need in needs if room.holds(need)), None)


def fit(config: RunConfig, node: NodeConfig, room: Room) -> MemoryNeed:
    """What the node offers: the need with all the shards that it has room for, under the fastest plan for them.

    Raises MachineError if the shards of `node.capacity`, or without it a single one, do not fit.
    """
    asked = min(node.capacity or config.num_shards, config.num_shards)
    for num_owned in range(asked, asked - 1 if node.capacity else 0, -1):
        need = largest_plan(config, node, num_owned, room)
        if need is not None:
            return need
    raise MachineError(_refusal(config, node, room))


def plans(config: RunConfig, num_ranks: int = 1) -> Iterator[StepPlan]:
    """From the fastest to the smallest."""
    plan: StepPlan | None = whole_batch(config.training, num_ranks)
    while plan is not None:
        yield plan
        plan = smaller(plan)


def after(failed: StepPlan, candidates: Iterable[StepPlan]) -> Iterator[StepPlan]:
    """Those of the plans that need less memory than this one."""
    size = (not failed.checkpoint, failed.micro_sequences)
    return (plan for plan in candidates if (not plan.checkpoint, plan.micro_sequences) < size)


def told(config: RunConfig, need: MemoryNeed, room: Room) -> str:
    """One line on what was chosen and what it needs."""
    words = f"memory: room for {need.num_owned} of {config.num_shards} shards in {need.plan}"
    words += f"; that needs {bytes_text(need.device.peak_bytes)} {room.of}"
    return words if need.host is None else f"{words}, and {bytes_text(need.host.peak_bytes)} of main memory"


def _refusal(config: RunConfig, node: NodeConfig, room: Room) -> str:
    """What does not fit, and the first of the remedies that would help."""
    num_owned = min(node.capacity or 1, config.num_shards)
    smallest = _smallest(config, node, num_owned)
    lacking = f"{bytes_text(smallest.device.peak_bytes)} {room.of}"
    if smallest.host is not None and smallest.device.peak_bytes <= room.device_bytes:
        free = bytes_text(room.host_bytes or 0)
        lacking = f"{bytes_text(smallest.host.peak_bytes)} of main memory, of which {free} is free"
    shards = f"{num_owned} shard{'s' if num_owned > 1 else ''}"
    what = f"not enough memory for {shards} of this run: even in {smallest.plan} that needs {lacking}"
    return f"{what}\n{_remedy(config, node, room, num_owned)}"


def _remedy(config: RunConfig, node: NodeConfig, room: Room, num_owned: int) -> str:
    for fewer in range(num_owned - 1, 0, -1):
        if room.holds(_smallest(config, node, fewer)):
            return f"Own fewer shards: --capacity {fewer} fits."
    flags = {"frozen_format": "--frozen-format", "moments": "--moments"}
    for changes in ({"frozen_format": "int8"}, {"moments": "int8"}, {"frozen_format": "int4", "moments": "int8"}):
        other = node.model_copy(update=changes)
        if room.holds(_smallest(config, other, 1)):
            fewer_too = " --capacity 1" if num_owned > 1 else ""
            return (
                "It fits with " + " ".join(f"{flags[key]} {value}" for key, value in changes.items()) + fewer_too + "."
            )
    least = _smallest(config, node.model_copy(update={"frozen_format": "int4", "moments": "int8"}), 1)
    return (
        f"The least that this run takes is {bytes_text(least.device.peak_bytes)}, with --frozen-format int4 "
        "--moments int8: use a machine with more memory, or allow more (--memory)."
    )


def _smallest(config: RunConfig, node: NodeConfig, num_owned: int) -> MemoryNeed:
    needs = (memory_need(config, node, num_owned, plan) for plan in plans(config, node.num_ranks))
    return min(needs, key=lambda need: need.device.peak_bytes)
