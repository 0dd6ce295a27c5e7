"""A wish to leave, which outlives a restart, and what a proper leave hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from spes_p2p.errors import MachineError, TrainerError
from spes_p2p.ids import Digest
from spes_p2p.node.driver import Driver
from spes_p2p.node.files import LEAVE_FILE
from spes_p2p.node.handover import encode_index, fetch_s
from spes_p2p.node.pausing import Pace, shards_text
from spes_p2p.node.sizes import handover_bytes
from spes_p2p.node.snapshot import LeaveStep, LeaveView
from spes_p2p.node.training import Training
from spes_p2p.ports import BlobStore
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.progress import Progress
from spes_p2p.storage.atomic import write_file

_HANDOVER_EXTRA_MS = 2_000
"""For asking and answering, besides the bytes at the run's minimum rate."""
_BEFORE_THE_CUT = frozenset({"load", "train", "publish", "acknowledge"})
"""Phases in which the round's cut can still name the leave."""


class LeaveStage(IntEnum):
    """How far a leave is before it has been said."""

    FINISH = 0
    HAND_OVER = 1
    SAID = 2


class LeaveWish:
    """Whether the node was asked to leave properly: `wanted`, and a file in the data folder until it is done."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / LEAVE_FILE
        self.wanted = asyncio.Event()
        self.stage = LeaveStage.FINISH
        self.handover_bytes = 0
        """What those who take over have to fetch."""
        self.given_up = ""
        """Why nothing is handed over, for people; empty: it is, or there is nothing."""

    @property
    def is_stored(self) -> bool:
        """Whether a leave was asked for that has not come to its end, perhaps before a restart."""
        return self._path.exists()

    def want(self) -> None:
        """Leave. Raises MachineError if the wish cannot be stored; it holds all the same until the node ends."""
        self.wanted.set()
        write_file(self._path, b"")

    def forget(self) -> None:
        """It is done, or void."""
        self._path.unlink(missing_ok=True)


class Promises(Protocol):
    """What this machine's limits let a leave promise: `keeper.Budgets`."""

    def handover_refusal(self, handover_bytes: int, within_s: float) -> str:
        """Why a hand-over of so many bytes, fetched within that time, may not be promised; empty: it may."""
        ...

    def promise(self, blobs: Mapping[Digest, int]) -> None:
        """These blobs, with their bytes, are promised."""
        ...


async def leave_properly(
    driver: Driver,
    training: Training,
    blobs: BlobStore,
    notify: Callable[[str, str], None],
    wish: LeaveWish,
    promises: Promises,
) -> None:
    """Let the training that is under way end and its update go out, export masters and moments, and say the leave.

    Nothing is trained after the export: what is handed over is what the last update published. What the limits would
    not let this node serve is not promised: then it leaves without a hand-over, and says what is given up.
    """
    shards: dict[int, tuple[Digest, int]] = {}
    await driver.rounds.finish()
    wish.stage = LeaveStage.HAND_OVER
    if driver.machine.is_member:
        wish.given_up = _refusal(driver.machine.head, training.owned, promises)
        if wish.given_up:
            notify("warning", _given_up_text(wish.given_up, training.owned))
        else:
            shards = await _export(training, notify)
    wish.stage, wish.handover_bytes = LeaveStage.SAID, sum(size for _, size in shards.values())
    if not shards:
        driver.give(fx.LeaveWanted(handover=None, handover_bytes=0))
        return
    index = encode_index(shards)
    blob = await asyncio.to_thread(blobs.put, index)
    driver.pin([blob, *(shard_blob for shard_blob, _ in shards.values())])
    promises.promise({blob: len(index), **dict(shards.values())})
    driver.give(fx.LeaveWanted(handover=blob, handover_bytes=len(index)))


async def _export(training: Training, notify: Callable[[str, str], None]) -> dict[int, tuple[Digest, int]]:
    try:
        return await training.export()
    except (TrainerError, MachineError) as error:
        notify("warning", f"nothing is handed over: {error}")
        return {}


def _refusal(head: Head, shards: Sequence[int], promises: Promises) -> str:
    """Why the limits do not let these shards be handed over; empty: they do, or nobody takes over."""
    if not shards or len(head.state.roster) < 2:
        return ""
    config = head.run.config
    # heirs of one shard each fetch side by side, and none waits longer for the others
    within_s = min(config.protocol.round_max_ms / 1000, fetch_s(head, 1))
    return promises.handover_refusal(sum(handover_bytes(config, shard) for shard in shards), within_s)


def _given_up_text(why: str, shards: Sequence[int]) -> str:
    return (
        f"nothing is handed over: {why}; the optimizer state of {shards_text(shards)} is given up; their "
        "certified values stay in the swarm, and the new owners go on from these"
    )


def leave_view(
    wish: LeaveWish, head: Head | None, progress: Progress | None, pace: Pace, *, has_left: bool
) -> LeaveView:
    """What remains of a leave that is wanted, and about how long until this machine may be switched off.

    `head`, `progress`: None before the machine runs, when there is nothing to leave.
    """
    if has_left:
        last = LeaveStep(name="last messages", text="the last messages are on their way; safe to close")
        return LeaveView(steps=(last,), safe_in_ms=0, safe_to_close=True)
    if head is None or progress is None:
        return LeaveView(safe_in_ms=0, safe_to_close=True)
    rate = head.run.config.protocol.min_rate_bytes_per_s
    hand_over_ms = wish.handover_bytes * 1000 // rate + _HANDOVER_EXTRA_MS
    missing, total = progress.successors
    if progress.let_go_ms is not None:
        text = f"the new owners fetch what is handed over ({total - missing} of {total} have)"
        longest_ms = head.run.config.protocol.round_max_ms - progress.let_go_ms
        left_ms = hand_over_ms - progress.let_go_ms
        step = LeaveStep(name="successors", text=text)
        return LeaveView(steps=(step,), safe_in_ms=max(0, min(left_ms if left_ms > 0 else longest_ms, longest_ms)))
    num_rounds = 1 if progress.phase in _BEFORE_THE_CUT else 2
    until_ms = None if progress.tentative or progress.waiting else pace.until_ms(num_rounds, progress.elapsed_ms)
    hands_over = len(head.state.roster) > 1 and (wish.stage < LeaveStage.SAID or wish.handover_bytes > 0)
    if until_ms is not None and hands_over:
        until_ms += hand_over_ms
    return LeaveView(steps=_steps(wish, progress, hands_over=hands_over), safe_in_ms=until_ms)


def _steps(wish: LeaveWish, progress: Progress, *, hands_over: bool) -> tuple[LeaveStep, ...]:
    """Before a certificate lets the node go."""
    steps = []
    if wish.stage <= LeaveStage.FINISH:
        steps.append(LeaveStep(name="finish", text="this round's training ends, and its update goes out"))
    if wish.stage <= LeaveStage.HAND_OVER:
        steps.append(LeaveStep(name="hand over", text="masters and moments are packed for those who take over"))
    tentative = "; tentative ones let nobody go" if progress.tentative or progress.waiting else ""
    without = f"; nothing is handed over: {wish.given_up}" if wish.given_up else ""
    steps.append(LeaveStep(name="certificate", text=f"the certificate that lets this node go{tentative}{without}"))
    if hands_over:
        steps.append(LeaveStep(name="successors", text="the new owners fetch what is handed over"))
    return tuple(steps)
