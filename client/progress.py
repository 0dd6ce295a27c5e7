"""A running node as plain lines: its log, one line per phase, one per certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from spes_p2p.client.commands.status import round_text
from spes_p2p.client.logs import LEVELS
from spes_p2p.client.standing import is_tentative, leave_text
from spes_p2p.node.control import NodeHandle
from spes_p2p.node.snapshot import NodeSnapshot

LOOK_EVERY_S = 1.0
COUNTDOWN_MS = 10_000
"""What remains of a leave is told when a step is done, and about so often."""


@dataclass(slots=True)
class Progress:
    """Turns successive looks at a node into lines. Each log line, phase and certificate is told once."""

    log: structlog.typing.FilteringBoundLogger
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    """Waits so many seconds."""
    _last_event: int = 0
    _phase: tuple[int, str, str] = field(default=(-1, "", ""))
    _certified: int = -1
    _leave: tuple[tuple[str, ...], int] | None = None

    def look(self, handle: NodeHandle) -> None:
        """Tell what is new since the last look."""
        self.tell_events(handle)
        snapshot = handle.snapshot()
        if snapshot.certified_round > self._certified >= 0:
            self._tell_certificate(snapshot)
        # a branch that is left takes certificates with it: the log says so
        self._certified = snapshot.certified_round
        self._tell_leave(snapshot)
        view = snapshot.round
        phase = (view.number, view.phase, f"{view.waiting_for}/{snapshot.waiting}")
        if phase != self._phase:
            self._phase = phase
            self.log.info(f"round {view.number}: {round_text(snapshot)}", round=view.number, phase=view.phase)

    def _tell_leave(self, snapshot: NodeSnapshot) -> None:
        view = snapshot.leave
        if view is None:
            return
        told = tuple(step.text for step in view.steps), (view.safe_in_ms or 0) // COUNTDOWN_MS
        if told != self._leave:
            self._leave = told
            self.log.info(leave_text(view), safe_in_ms=view.safe_in_ms)

    def tell_events(self, handle: NodeHandle) -> None:
        """Tell the log lines that are new; works when the node has ended, too."""
        for event in handle.events(self._last_event):
            self._last_event = max(self._last_event, event.number)
            self.log.log(LEVELS[event.level], event.text)

    async def follow(self, handle: NodeHandle) -> None:
        """Look whenever something changes, until cancelled."""
        while True:
            self.look(handle)
            if self._phase[1] == "load":
                # a newcomer passes hundreds of old certificates in a second
                await self.sleep(LOOK_EVERY_S)
            else:
                await handle.wait_change(self._last_event, LOOK_EVERY_S)

    def _tell_certificate(self, snapshot: NodeSnapshot) -> None:
        learning = snapshot.learning
        mine = [view.shard for view in snapshot.shards if view.mine]
        facts = {"shards": mine, "tokens_total": learning.tokens_total, "final": snapshot.final_round}
        if learning.val_curve:
            facts["val_round"], facts["val_loss"] = learning.val_curve[-1][0], round(learning.val_curve[-1][1], 4)
        how = "certified tentatively" if is_tentative(snapshot) else "certified"
        self.log.info(f"round {snapshot.certified_round} {how}", certified=snapshot.certified_round, **facts)
