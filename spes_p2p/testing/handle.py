"""A `NodeHandle` without a node behind it, and snapshots of an imagined swarm: for the local API and the UI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from spes_p2p.config import Limits
from spes_p2p.node.budgets.limits import OFF, changed
from spes_p2p.node.snapshot import (
    PHASES,
    Counters,
    LearningView,
    LimitsView,
    LimitView,
    LogEvent,
    MachineView,
    NetworkView,
    NodeSnapshot,
    PauseView,
    PeerView,
    Phase,
    PhaseView,
    RoundView,
    ShardView,
    UpdateView,
)


def imagined_peer(number: int) -> str:
    """Something that looks like a peer id; no key belongs to it."""
    return f"12D3KooW{'ABCDEFGHJK'[number] * 40}{number:04d}"


def imagined_snapshot(
    *, num_peers: int = 4, num_shards: int = 8, phase: Phase = "train", number: int = 7
) -> NodeSnapshot:
    """A node in the middle of a round: peer 0 is this one, shards go round, the last one is an orphan."""
    open_phase = PHASES.index(phase) if phase in PHASES else -1
    owners = [(imagined_peer(shard % num_peers),) for shard in range(num_shards - 1)] + [()]
    return NodeSnapshot(
        version="0.1.0",
        run_name="imagined",
        run_id="ab" * 32,
        peer=imagined_peer(0),
        started_ms_ago=754_000,
        member=True,
        voter=True,
        leaving=False,
        certified_round=number - 1,
        final_round=number - 1,
        psi_digest="cd" * 32,
        round=RoundView(
            number=number,
            phase=phase,
            phases=tuple(
                PhaseView(
                    name=name,
                    progress=1.0 if index < open_phase else 0.3 if index == open_phase else 0.0,
                    detail="12/40 steps" if name == "train" else "",
                )
                for index, name in enumerate(PHASES)
            ),
            elapsed_ms=4_200,
            time_left_ms=35_000,
            leader=imagined_peer(1),
            votes=1,
            votes_needed=3,
        ),
        shards=tuple(
            ShardView(shard=shard, owners=who, mine=imagined_peer(0) in who, last_accepted_round=number - 1)
            for shard, who in enumerate(owners)
        ),
        learning=LearningView(
            loss_curve=tuple((step, 5.5 - 0.01 * step) for step in range(0, 240, 4)),
            val_curve=tuple((index, 5.6 - 0.4 * index) for index in range(number)),
            tokens_per_s=12_345.6,
            tokens_total=245_760,
            inner_step=12,
            inner_steps=40,
            global_step=240,
            updates=(UpdateView(round=number - 1, verdict="accepted", tokens=40_960),),
        ),
        network=NetworkView(
            bytes_sent=12_000_000,
            bytes_received=34_500_000,
            sent_per_s=120_000.0,
            received_per_s=340_000.0,
            peers=tuple(
                PeerView(
                    peer=imagined_peer(index),
                    me=index == 0,
                    voter=True,
                    connected=index != 3,
                    shards=tuple(shard for shard, who in enumerate(owners) if imagined_peer(index) in who),
                    accepted_updates=number - 2,
                    last_item_round=number - 1,
                )
                for index in range(num_peers)
            ),
            listen=("/ip4/127.0.0.1/tcp/4001",),
        ),
        machine=MachineView(device="cpu", memory_bytes=350_000_000),
        counters=Counters(rounds_adopted=number - 1),
    )


class FakeHandle:
    """Satisfies `control.NodeHandle`. Shows what `show` was given, remembers what was asked of it."""

    def __init__(self, snapshot: NodeSnapshot | None = None) -> None:
        self._snapshot = snapshot or imagined_snapshot()
        self._events: list[LogEvent] = []
        self._changed = asyncio.Condition()
        self._version = 0
        self.asked: list[str] = []

    def snapshot(self) -> NodeSnapshot:
        """What was shown last."""
        return self._snapshot

    def events(self, after: int) -> tuple[LogEvent, ...]:
        """Log lines above `after`."""
        return tuple(event for event in self._events if event.number > after)

    async def wait_change(self, after: int, timeout_s: float) -> None:
        """Return at once if there is a line above `after`, else at the next change, or after the time."""
        version = self._version

        def changed() -> bool:
            return self._version != version or bool(self.events(after))

        await self._wait(changed, timeout_s)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)
            except TimeoutError:
                return

    async def show(self, snapshot: NodeSnapshot | None = None, *, log: str | None = None) -> None:
        """Change what the handle shows, and wake whoever waits."""
        async with self._changed:
            self._snapshot = snapshot or self._snapshot
            if log is not None:
                number = len(self._events) + 1
                self._events.append(LogEvent(number=number, at_ms=1_000 * number, level="info", text=log))
            self._version += 1
            self._changed.notify_all()

    def request_leave(self) -> None:
        """Remembered in `asked`."""
        self.asked.append("leave")
        self._snapshot = msgspec.structs.replace(self._snapshot, leaving=True)

    def request_recovery(self) -> None:
        """Remembered in `asked`; a new epoch begins if the snapshot has a plan for it."""
        self.asked.append("recover")
        plan, epoch = self._snapshot.recovery, self._snapshot.epoch
        if plan is not None:
            self._snapshot = msgspec.structs.replace(self._snapshot, epoch=epoch + 1, recovery=None)

    async def change_limits(self, changes: Mapping[str, str]) -> LimitsView:
        """Checked, and shown in the snapshot as they were written; None is used."""
        changed(Limits(), changes)
        kept = {view.name: view for view in self._snapshot.limits.limits} | {
            name: LimitView(name=name, limit=text, used="nothing") for name, text in changes.items()
        }
        limits = LimitsView(limits=tuple(view for view in kept.values() if view.limit != OFF))
        self._snapshot = msgspec.structs.replace(self._snapshot, limits=limits)
        return limits

    def set_hold(self, reason: str, held: bool) -> None:
        """Remembered in `asked`, and in the snapshot."""
        self.asked.append(f"{'hold' if held else 'release'} {reason}")
        pause = PauseView(reasons=(reason,), since_ms=0, reason="shard 0 kept for 2 rounds") if held else None
        self._snapshot = msgspec.structs.replace(self._snapshot, paused=held, pause=pause)

    def request_stop(self, *, keep_wish: bool = False) -> None:
        """Remembered in `asked`."""
        self.asked.append("stop, leave kept" if keep_wish else "stop")
