"""Keeps a node within its limits: looks every second, holds training, stops blobs, counts the month, tells people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from spes_p2p.config import Limits
from spes_p2p.errors import MachineError
from spes_p2p.ids import Digest
from spes_p2p.node.budgets.facts import OtherLoad, on_battery
from spes_p2p.node.budgets.idleness import Idleness
from spes_p2p.node.budgets.judge import Facts, judge, view
from spes_p2p.node.budgets.keeping_up import Demand, Judgement, keep_up
from spes_p2p.node.budgets.limits import changed
from spes_p2p.node.budgets.month import MonthBook, MonthCount
from spes_p2p.node.budgets.power import GpuPower
from spes_p2p.node.budgets.promise import aside_bytes, refusal
from spes_p2p.node.budgets.store import read_limits, read_month, write_limits, write_month
from spes_p2p.node.rates import Rates
from spes_p2p.node.snapshot import LimitsView

LOOK_EVERY_S = 1.0
LOAD_EVERY_S = 3.0
"""Other programs' load: looking through all processes costs some milliseconds."""


class Line(Protocol):
    """What is limited of the transport."""

    def set_rates(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """Limit both directions; None: no limit."""
        ...

    def set_no_blobs(self, reason: str, spared: frozenset[Digest]) -> None:
        """Neither serve nor fetch blobs, but serve the spared ones; empty: do."""
        ...

    def bytes_up(self) -> int:
        """Since the start."""
        ...

    def bytes_down(self) -> int:
        """Since the start."""
        ...


class Worker(Protocol):
    """What is limited of the trainer process."""

    def set_share(self, share: float) -> None:
        """Work for this share of the time, from the next step on."""
        ...


class Machine:
    """What is measured of the machine; tests put another in its place."""

    def __init__(self) -> None:
        self._load: OtherLoad | None = None

    def now(self) -> datetime:
        """Local time."""
        return datetime.now()

    def now_s(self) -> float:
        """Monotonic."""
        return time.monotonic()

    def other_cores(self) -> float | None:
        """Cores that other programs took since the last call; None at the first one."""
        if self._load is None:
            self._load = OtherLoad()
            return None
        return self._load.cores()

    def on_battery(self) -> bool | None:
        """None: it has none, or does not say."""
        return on_battery()


class Budgets:
    """One node's limits. `open` at the start, `limit_line` before the first blob, `run` beside everything else, `close`
    at the end."""

    def __init__(
        self,
        data_dir: Path,
        set_hold: Callable[[str, bool], None],
        tell: Callable[[str, str], None],
        power: GpuPower,
        machine: Machine | None = None,
    ) -> None:
        """`set_hold`: hold training for a reason, or no longer, and tell people (`holds.Pausable`). `tell`: (level,
        text), all else that people should know."""
        self._data_dir = data_dir
        self._set_hold = set_hold
        self._tell = tell
        self._power = power
        self._machine = machine or Machine()
        self.limits = Limits()
        self._judged: Judgement | None = None
        self._demand: Callable[[], tuple[Demand, int]] | None = None
        self._told: set[str] = set()
        """What people were told of how the line keeps up."""
        self._line: Line | None = None
        self._worker: Worker | None = None
        self._book: MonthBook | None = None
        self._idleness = Idleness()
        self._load_at_s = float("-inf")
        self._rates = Rates()
        self._facts = Facts(now=self._machine.now())
        self._held: tuple[str, ...] = ()
        self._promised: Mapping[Digest, int] = {}
        """Blobs of a hand-over, with their bytes."""
        self._cannot_store = False
        self._changing = asyncio.Lock()

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self, wanted: Limits | None) -> None:
        """Take up the limits: `wanted`, or those that the data folder remembers.

        Raises LocalStateError for a damaged file, MachineError if the GPU's driver refuses.
        """
        self.limits = read_limits(self._data_dir) if wanted is None else wanted
        self._book = MonthBook(read_month(self._data_dir), self._machine.now().date())
        await asyncio.to_thread(self._power.set, self.limits.gpu_power)

    async def limit_line(self, line: Line) -> None:
        """The network is there: only a start that came so far is worth remembering. Raises MachineError if the disk
        refuses."""
        self._line = line
        self._apply()
        await asyncio.to_thread(write_limits, self._data_dir, self.limits)
        await self.look()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def close(self) -> None:
        """Store the count of the month as it is, and give the GPUs their power back."""
        await asyncio.to_thread(self._power.restore)
        if self._book is not None and self._line is not None:
            self._book.look(self._line.bytes_up(), self._line.bytes_down(), self._machine.now().date())
            await self._store(self._book.exact())

    def limit_worker(self, worker: Worker) -> None:
        """The trainer process is there."""
        self._worker = worker
        self._apply()

    # --- limits ------------------------------------------------------------------------------------------------------

    async def change(self, changes: Mapping[str, str]) -> LimitsView:
        """Change limits, name -> text as people write it, now and over restarts.

        Raises ConfigError that names the flag; MachineError if the GPU's driver or the disk refuses, or if the line
        would not keep up with the run: nothing is changed then.
        """
        async with self._changing:
            limits = changed(self.limits, changes)
            judged = self._judge(limits)
            await self._set_power_and_store(limits)
            self.limits, self._judged = limits, judged or self._judged
            self._told.clear()
            self._apply()
            self._tell("info", f"limits changed: {', '.join(f'{name} {text}' for name, text in changes.items())}")
            self._tell_why(judged)
        await self.look()
        return self.view()

    async def _set_power_and_store(self, limits: Limits) -> None:
        """Both, or neither. Raises MachineError, which says so where the driver does not undo what it has done."""
        changes_power = limits.gpu_power != self.limits.gpu_power
        if changes_power:
            await asyncio.to_thread(self._power.set, limits.gpu_power)
        try:
            await asyncio.to_thread(write_limits, self._data_dir, limits)
        except MachineError as error:
            if changes_power:
                try:
                    await asyncio.to_thread(self._power.set, self.limits.gpu_power)
                except MachineError as second:
                    raise MachineError(f"{error}\nThe GPUs' power could not be put back: {second}") from error
            raise

    def fit_run(self, demand: Demand, offered: int, *, stated: bool) -> int:
        """Shards to offer so that the line keeps up with what the run asks now. Raises MachineError if it cannot."""
        judged = keep_up(demand, self.limits, offered, stated=stated)
        if judged.refusal:
            raise MachineError(judged.refusal)
        self._judged = judged
        self._tell_why(judged)
        return judged.capacity

    def follow_run(self, demand: Callable[[], tuple[Demand, int]]) -> None:
        """What the run asks from now on, and how many shards this node owns: by these a round's inner steps, and
        changes of the limits, are judged."""
        self._demand = demand

    @property
    def share(self) -> float:
        """Of the time, that training takes."""
        return self.limits.time_share

    def inner_steps(self, num_inner_steps: int, step_s: float | None) -> int:
        """To make of so many, with the members and shards of now. `step_s`: of one without rests; None: not known.

        A line that the run has outgrown, by members or by shards, gives what it can.
        """
        if self._demand is None:
            return num_inner_steps
        demand, num_owned = self._demand()
        demand = replace(demand, inner_steps=num_inner_steps)
        self._judged = keep_up(demand, self.limits, num_owned, stated=True, step_s=step_s)
        self._tell_why(self._judged)
        return self._judged.inner_steps

    def _judge(self, limits: Limits) -> Judgement | None:
        """With the shards of now; other numbers are offered at the next start. Raises MachineError."""
        if self._demand is None:
            return None
        demand, num_owned = self._demand()
        judged = keep_up(demand, limits, max(1, num_owned), stated=num_owned > 0)
        if judged.refusal:
            raise MachineError(judged.refusal)
        return judged

    def _tell_why(self, judged: Judgement | None) -> None:
        if judged is not None and judged.why and judged.why not in self._told:
            self._told.add(judged.why)
            self._tell("warning", judged.why)

    def _apply(self) -> None:
        if self._line is not None:
            self._line.set_rates(self.limits.upload, self.limits.download)
        if self._worker is not None:
            self._worker.set_share(self.share)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def handover_refusal(self, handover_bytes: int, within_s: float) -> str:
        """Why a hand-over of so many bytes, fetched within that time, may not be promised; empty: it may."""
        demand = self._demand() if self._demand is not None else None
        return refusal(self.limits, self._facts.month_bytes, demand, handover_bytes, within_s)

    def promise(self, blobs: Mapping[Digest, int]) -> None:
        """These blobs, with their bytes, were promised to new owners: keep the month's bytes for them until the end."""
        self._promised = blobs

    # --- looking -----------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Measure, and do what the limits ask."""
        line, book = self._line, self._book
        if line is None or book is None:
            return
        now, now_s = self._machine.now(), self._machine.now_s()
        up, down = line.bytes_up(), line.bytes_down()
        to_store = book.look(up, down, now.date())
        up_per_s, down_per_s = self._rates.measure(now_s, up, down)
        if self.limits.idle_only:
            await self._look_at_others(now_s)
        else:
            self._idleness = Idleness()
        self._facts = Facts(
            now=now,
            month_bytes=book.total_bytes,
            aside_bytes=aside_bytes(sum(self._promised.values())) if self._promised else 0,
            up_per_s=up_per_s,
            down_per_s=down_per_s,
            others_busy=self._idleness.busy,
            others_cores=self._idleness.cores,
            on_battery=self._machine.on_battery() if self.limits.pause_on_battery else None,
            note=self._judged.why if self._judged is not None else "",
        )
        self._follow(line)
        if to_store is not None:
            await self._store(to_store)

    async def _look_at_others(self, now_s: float) -> None:
        if now_s - self._load_at_s < LOAD_EVERY_S:
            return
        self._load_at_s = now_s
        cores = await asyncio.to_thread(self._machine.other_cores)
        if cores is not None:
            self._idleness.look(now_s, cores)

    def _follow(self, line: Line) -> None:
        verdict = judge(self.limits, self._facts)
        line.set_no_blobs(verdict.no_blobs, frozenset(self._promised) if verdict.spares_promised else frozenset())
        # what holds now comes first: a limit that is changed lets nothing begin in between
        for reason in verdict.holds:
            if reason not in self._held:
                self._set_hold(reason, True)
        for reason in self._held:
            if reason not in verdict.holds:
                self._set_hold(reason, False)
        self._held = verdict.holds

    async def _store(self, count: MonthCount) -> None:
        try:
            await asyncio.to_thread(write_month, self._data_dir, count)
            self._cannot_store = False
        except MachineError as error:
            if not self._cannot_store:
                self._cannot_store = True
                self._tell("warning", f"a restart would forget this month's bytes: {error}")

    def view(self) -> LimitsView:
        """The limits as they stand, for the snapshot."""
        return view(self.limits, self._facts)
