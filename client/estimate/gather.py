"""Everything that `spes-p2p estimate` has to know: of the run, by a visit; of this machine, by measuring it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spes_p2p.config import Limits, NodeConfig, RunConfig
from spes_p2p.errors import MachineError
from spes_p2p.network.link import InviteLink
from spes_p2p.node.budgets.keeping_up import Demand, Judgement, demand_of, keep_up
from spes_p2p.node.outlook import likely_shards
from spes_p2p.node.room import room_for_ranks
from spes_p2p.node.step_rate import StepTimes, measure_steps
from spes_p2p.node.visit import Look, look, visiting, watch_rounds
from spes_p2p.protocol.head import Terms
from spes_p2p.training.fit import Room, fit, largest_plan
from spes_p2p.training.memory import MemoryNeed

MEASURE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for."""

    node: NodeConfig
    measure: bool
    watch_s: float
    limits: Limits
    """Those that are named, else those that a join would find set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known by now."""

    wishes: Wishes
    config: RunConfig
    look: Look
    room: Room
    most: MemoryNeed | None
    """With as many shards as there is room for; None: not even one fits."""
    need: MemoryNeed | None
    """With as many as this machine is likely to own."""
    refusal: str
    """Why nothing fits, and what would help."""
    steps: StepTimes | None
    unmeasured: str
    """Why there are no step times."""
    durations_s: tuple[float, ...]
    demand: Demand
    """What the run asks, with this machine among its members."""
    judged: Judgement
    """What a join would make of that and of the limits."""


def gather(invite: InviteLink, wishes: Wishes, tell: Callable[[str], None]) -> Facts:
    """Visit the run, then measure this machine: one after the other, since each would disturb the other. `tell` is
    told what is waited for. Raises UnreachableError."""
    tell("asking the run's peers")
    seen, durations = asyncio.run(_visit(invite, wishes, tell))
    config = seen.config
    room = room_for_ranks(
        [torch.device(device) for device in (wishes.node.device, *wishes.node.more_devices)], wishes.node.memory_bytes
    )
    most: MemoryNeed | None = None
    need: MemoryNeed | None = None
    refusal = ""
    demand = demand_of(Terms(seen.head), is_member=False)
    if durations:
        demand = replace(demand, round_s=sum(durations) / len(durations))
    stated = wishes.node.capacity is not None

    def judge(step_s: float | None) -> Judgement:
        return keep_up(demand, wishes.limits, most.num_owned if most else 1, stated=stated, step_s=step_s)

    try:
        most = fit(config, wishes.node, room)
        shards = wishes.node.capacity or likely_shards(seen.head, most.num_owned)
        need = largest_plan(config, wishes.node, min(shards, most.num_owned, judge(None).capacity), room) or most
    except MachineError as error:
        refusal = str(error)
    steps, unmeasured = _measure(config, wishes, need, tell)
    return Facts(
        wishes=wishes,
        config=config,
        look=seen,
        room=room,
        most=most,
        need=need,
        refusal=refusal,
        steps=steps,
        unmeasured=unmeasured,
        durations_s=durations,
        demand=demand,
        judged=judge(steps.mean_s if steps is not None else None),
    )


async def _visit(invite: InviteLink, wishes: Wishes, tell: Callable[[str], None]) -> tuple[Look, tuple[float, ...]]:
    async with visiting(invite) as transport:
        seen = await look(invite, transport, lambda level, text: None)
        if not wishes.watch_s:
            return seen, ()
        tell(f"watching the run's rounds, for {wishes.watch_s:.0f} s at most")
        return seen, await watch_rounds(transport, seen, wishes.watch_s)


def _measure(
    config: RunConfig, wishes: Wishes, need: MemoryNeed | None, tell: Callable[[str], None]
) -> tuple[StepTimes | None, str]:
    if need is None:
        return None, "the run does not fit"
    if not wishes.measure:
        return None, "--no-measure"
    if wishes.node.more_devices:
        return None, "several GPUs are measured by joining alone"
    tell("timing some inner steps")
    try:
        return measure_steps(config, wishes.node, need, MEASURE_S), ""
    except MachineError as error:
        return None, str(error).splitlines()[0]
