"""Loading and training, round after round: which waits for which.

    adoption r   load r: blobs, `StateReady(r + 1)`, end of the training of round r (its update comes late), trainer
    Train r+1    waits for load r, then trains; nothing is given if a newer certificate came first, or the load failed

Loads come one after the other. One that a newer certificate has overtaken is given up. When a branch is left, the
training on it ends and gives nothing.

While training is held (`holds`), what is under way ends after its present step and is handed in; a round that has not
begun waits, since a short pause need not cost it, until it is released or another peer publishes: then the others must
not wait for this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from spes_p2p.errors import BlobError, NotFiniteError, SchemaError, TrainerError
from spes_p2p.node.holds import Changes, Holds
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.training import Training
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head


@dataclass(slots=True)
class _Order:
    """A training that is under way or waits for its start."""

    train: fx.Train
    stopped: bool = False
    """It is to end, or not to begin."""
    abandoned: bool = False
    """It is on a branch that was left: what comes of it is not given."""
    waits: bool = False
    """Training is held: it waits for the end of that."""


Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class RoundTasks:
    """The load and the training that are under way."""

    def __init__(
        self,
        sync: StateSync,
        training: Training,
        spawn: Spawn,
        give: Callable[[fx.Input], None],
        notify: Callable[[str, str], None],
        holds: Holds | None = None,
    ) -> None:
        self._sync = sync
        self._holds = holds or Holds()
        self._woken = Changes()
        """Whoever waits for the end of a hold looks again."""
        self._trainer = training
        self._spawn = spawn
        self._give = give
        self._notify = notify
        self._training: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._orders: list[_Order] = []
        self._is_finishing = False
        self._is_finished = False
        self.num_published = 0

    async def finish(self) -> None:
        """Return when the training that is under way has ended; none begins any more: orders give nothing."""
        self._is_finishing = True
        self._woken.tell()
        while self._training is not None and not self._training.done():
            await asyncio.wait([self._training])
        self._is_finished = True

    def hold_changed(self) -> None:
        """A reason to hold training has come or gone: end what is under way, or let begin what waits."""
        if self._holds.held:
            self._trainer.stop()
        self._woken.tell()

    @property
    def is_training(self) -> bool:
        """Whether a round is being trained, not one that waits for the end of a hold."""
        return any(not order.waits for order in self._orders)

    @property
    def is_held_back(self) -> bool:
        """Whether a round could be trained but for a hold."""
        return any(order.waits and not order.stopped for order in self._orders)

    def give_up(self) -> None:
        """Others have published: say for a round that is held back that there will be nothing."""
        for order in self._orders:
            order.stopped |= order.waits
        self._woken.tell()

    def load(self) -> None:
        """Bring the state of the newest certificate here and into the trainer."""
        self._loading = self._spawn(self._load(self._sync.head, self._loading, self._training), "load state")

    def train(self, order: fx.Train) -> None:
        """Train a round once its start is loaded."""
        entry = _Order(order)
        self._orders.append(entry)
        self._training = self._spawn(self._train(entry, self._loading), "train")

    def stop(self, round_number: int) -> None:
        """End the training of that round, and of older ones, also if it has not begun."""
        for order in self._orders:
            order.stopped |= order.train.round <= round_number
        self._trainer.stop()
        self._woken.tell()

    def abandon(self) -> None:
        """The branch that was trained on has been left: end all training, and give nothing of it."""
        for order in self._orders:
            order.stopped = order.abandoned = True
        self._trainer.stop()
        self._woken.tell()

    async def _train(self, order: _Order, loading: asyncio.Task[None] | None) -> None:
        try:
            self._give(await self._result_of(order, loading))
        finally:
            self._orders.remove(order)

    async def _result_of(self, order: _Order, loading: asyncio.Task[None] | None) -> fx.Trained:
        nothing = fx.nothing_trained(order.train.round, order.train.base)
        if loading is not None:
            await asyncio.wait([loading])
        order.waits = True
        while self._holds.held and not order.stopped and not self._is_finishing:
            await self._woken.wait()
        order.waits = False
        if self._is_finished or order.stopped or self._holds.held:
            return nothing
        result = await self._trainer.train(order.train)
        if order.abandoned:
            return nothing
        if result.pieces:
            self.num_published += 1
            self._sync.published(result)
        return result

    async def _load(self, head: Head, before: asyncio.Task[None] | None, training: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        if not await self._sync.bring_state(head):
            return
        self._give(fx.StateReady(round=head.round + 1, head=head.hash))
        if training is not None and not training.done():
            self.stop(head.round)
            await asyncio.wait([training])
        if self._sync.head is not head:
            return
        try:
            for taken in await self._sync.load_trainer(self._trainer):
                self._give(taken)
        except (TrainerError, BlobError, SchemaError, NotFiniteError) as error:
            if self._sync.head is head:
                self._notify("error", f"round {head.round + 1} gets no update of this node: {error}")
