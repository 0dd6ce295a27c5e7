"""Several ranks on this machine's CPU, this process being the first: for tests of what is spread over devices."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from spes_p2p.config import ModelConfig, RunConfig, TrainingConfig
from spes_p2p.digests import digest
from spes_p2p.node.ranks import RankProcesses
from spes_p2p.testing.training import tiny_documents, tiny_run
from spes_p2p.training.data import TokenStream
from spes_p2p.training.engine import Engine
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.spread import SpreadEngine
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import Trainer

SPREAD_MODEL = ModelConfig(width=32, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=8, top_k=2, expert_width=24)
# Adam divides a gradient by its own size: without a larger eps, rounding in gradients near zero becomes whole steps.
SPREAD_TRAINING = TrainingConfig(
    sequence_length=16,
    batch_sequences=4,
    warmup_steps=4,
    total_steps=40,
    peak_lr=1e-2,
    psi_lr_ratio=0.5,
    adam_eps=1e-5,
)
SPREAD_RUN = tiny_run(model=SPREAD_MODEL, training=SPREAD_TRAINING)


class CpuTeam:
    """Started ranks. A process can belong to one group at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        self.reasons: list[str] = []
        """Why ranks ended by themselves."""
        self.died = threading.Event()
        self.processes = RankProcesses(["cpu"] * count, folder, on_death=self._on_death)
        self.processes.meet()

    def engine(self, config: RunConfig = SPREAD_RUN, **formats: str) -> SpreadEngine:
        """A fresh engine over them; `formats` are SpreadEngine's."""
        return SpreadEngine(config, self.processes, **formats)  # type: ignore[arg-type]  # literals, from parametrize

    @property
    def micro_alone(self) -> int:
        """The micro-batch with which one device does the same: the balance of experts is a product of means of one."""
        return -(-SPREAD_TRAINING.batch_sequences // self.count)

    def close(self) -> None:
        """End the other ranks, and leave the group."""
        self.processes.close()
        self.processes.ranks.close()

    def _on_death(self, reason: str) -> None:
        self.reasons.append(reason)
        self.died.set()


def trainer_on(engine: Engine, micro_sequences: int | None = None, checkpoint: bool = False) -> Trainer:
    """A trainer on the tiny documents, without a start."""
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("ranks", 0))
    micro = micro_sequences or engine.config.training.batch_sequences
    plan = StepPlan(micro_sequences=micro, checkpoint=checkpoint)
    return Trainer(engine.config, stream, engine=engine, plan=plan)


def largest_difference(one: Trainer, other: Trainer) -> float:
    """Of two trainers' weights, relative to the largest value of each. Raises KeyError if the names differ."""
    got, wanted = one.engine.weights(), other.engine.weights()
    if got.keys() != wanted.keys():
        raise KeyError(f"{sorted(got.keys() ^ wanted.keys())} are trained by one only")
    return max(float(np.abs(got[name] - wanted[name]).max() / np.abs(wanted[name]).max()) for name in wanted)
