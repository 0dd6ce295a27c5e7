"""A trainer that leaves time to publish."""

from __future__ import annotations

from typing import Any

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


class Paces:
    """A tenth fewer steps; what it was told of a step is noted."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.step_s: list[float | None] = []

    def inner_steps(self, num_inner_steps: int, step_s: float | None) -> int:
        self.step_s.append(step_s)
        return num_inner_steps * 9 // 10


async def test_steps_are_as_many_as_the_limits_leave_measured_by_the_last_training() -> None:
    worker, paces = PretendWorker(), Paces()
    trainer = PacedTrainer(worker, paces)
    await trainer.train(100)
    await trainer.train(10)
    assert worker.asked == [90, 9]
    assert paces.step_s == [None, 2.0]


async def test_rests_are_no_part_of_a_step() -> None:
    worker, paces = PretendWorker(), Paces(share=0.25)
    trainer = PacedTrainer(worker, paces)
    await trainer.train(10)  # 9 steps in 18 s: with 8 rests of three times a step
    await trainer.train(10)
    assert paces.step_s == [None, 18.0 / (9 + 8 * 3)]


async def test_everything_else_is_passed_on() -> None:
    worker = PretendWorker()
    trainer: Any = PacedTrainer(worker, Paces())
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
