"""A trainer that makes as many inner steps as leave time to publish over a capped line."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.ids import Digest
from spes_p2p.node.budgets.keeping_up import Pace
from spes_p2p.node.training import Requests
from spes_p2p.node.worker_messages import HandoverExported, HandoverImported, LoadStart, Published, Started, Trained


class PacedTrainer:
    """Satisfies `training.Requests`; passes everything on, and `train` with fewer steps where `pace` says so."""

    def __init__(self, worker: Requests, pace: Callable[[], Pace | None]) -> None:
        self._worker = worker
        self._pace = pace
        self._step_s: float | None = None
        """Of the last training."""

    async def train(self, num_inner_steps: int) -> Trained:
        """Make inner steps, at most so many."""
        pace = self._pace()
        wanted = num_inner_steps if pace is None else pace.steps(num_inner_steps, self._step_s)
        result = await self._worker.train(wanted)
        if result.num_steps:
            self._step_s = result.seconds / result.num_steps
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
