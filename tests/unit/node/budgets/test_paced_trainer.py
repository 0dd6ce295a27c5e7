"""A trainer that leaves time to publish."""

from __future__ import annotations

from typing import Any

from spes_p2p.node.budgets.keeping_up import Pace
from spes_p2p.node.budgets.pacing import PacedTrainer
from spes_p2p.node.worker_messages import Trained


class PretendWorker:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def train(self, num_inner_steps: int) -> Trained:
        self.asked.append(num_inner_steps)
        return Trained(
            round=2, num_steps=num_inner_steps, num_skipped=0, tokens=1, mean_loss=1.0,
            seconds=2.0 * num_inner_steps, finite=True,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> str:
            self.asked.append((name, *arguments))
            return name

        return ask


async def test_steps_are_fewer_by_what_publishing_takes_longer_measured_by_the_last_training() -> None:
    worker = PretendWorker()
    pace: list[Pace | None] = [Pace(capacity=1, shortened_s=60.0, round_max_s=600.0, note="")]
    trainer = PacedTrainer(worker, lambda: pace[0])
    await trainer.train(100)  # a step is taken to last 6 s: H fills a round
    await trainer.train(100)  # 2 s, as measured
    pace[0] = None
    await trainer.train(100)
    assert worker.asked == [90, 70, 100]


async def test_everything_else_is_passed_on() -> None:
    worker = PretendWorker()
    trainer: Any = PacedTrainer(worker, lambda: None)
    await trainer.load_start("start")
    await trainer.publish()
    await trainer.export_handover(1)
    await trainer.import_handover(2, b"blob")
    assert worker.asked == [
        ("load_start", "start"),
        ("publish",),
        ("export_handover", 1),
        ("import_handover", 2, b"blob"),
    ]
