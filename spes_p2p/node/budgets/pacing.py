"""A trainer that makes as many inner steps as leave time to publish over a capped line."""

from __future__ import annotations

from typing import Protocol

from spes_p2p.ids import Digest
from spes_p2p.node.budgets.duty import work_s
from spes_p2p.node.training import Requests
from spes_p2p.node.worker_messages import HandoverExported, HandoverImported, LoadStart, Published, Started, Trained


class Paces(Protocol):
    """What the limits leave of a training: `keeper.Budgets`."""

    @property
    def share(self) -> float:
        """Of the time, that training takes."""
        ...

    def inner_steps(self, num_inner_steps: int, step_s: float | None) -> int:
        """To make of so many. `step_s`: of one step without rests; None: not known yet."""
        ...


class PacedTrainer:
    """Satisfies `training.Requests`; passes everything on, and `train` with fewer steps where `paces` says so."""

    def __init__(self, worker: Requests, paces: Paces) -> None:
        self._worker = worker
        self._paces = paces
        self._step_s: float | None = None
        """Of the last training, without rests."""

    async def train(self, num_inner_steps: int) -> Trained:
        """Make inner steps, at most so many."""
        share = self._paces.share
        result = await self._worker.train(self._paces.inner_steps(num_inner_steps, self._step_s))
        if result.num_steps:
            self._step_s = work_s(result.seconds, result.num_steps, share)
        return result

    async def load_start(self, request: LoadStart) -> Started:
        """Load the start of a round."""
        return await self._worker.load_start(request)

    def stop_training(self) -> None:
        """Have the `train` that is being awaited end early."""
        self._worker.stop_training()

    async def publish(self) -> Published:
        """Store the update."""
        return await self._worker.publish()

    async def export_handover(self, shard: int) -> HandoverExported:
        """Store masters and moments of an owned shard."""
        return await self._worker.export_handover(shard)

    async def import_handover(self, shard: int, blob: Digest) -> HandoverImported:
        """Take over a shard."""
        return await self._worker.import_handover(shard, blob)
