"""How long an inner step of a run takes on this machine: made with fresh weights on random bytes, and timed.

What is learned does not matter, and neither does the text: all that a step costs is its shapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.digests import digest
from spes_p2p.model.init import initial_psi, initial_shard
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.data import TokenStream
from spes_p2p.training.documents import MAX_DOCUMENT_BYTES
from spes_p2p.training.engine import Engine
from spes_p2p.training.memory import MemoryNeed
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, StepReport, Trainer

MAX_STEPS = 50
_WARM_UP = 2
"""Steps that are not counted: the first ones allocate what the others find."""
_LEAST = 3
_NUM_DOCUMENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of single inner steps, one after the other."""

    seconds: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Of one step."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def deviation_s(self) -> float:
        """Standard deviation of one step."""
        mean = self.mean_s
        spread = sum((one - mean) ** 2 for one in self.seconds)
        return float((spread / max(1, len(self.seconds) - 1)) ** 0.5)


def _random_text() -> tuple[bytes, ...]:
    """Of all bytes but 0, which separates documents."""
    drawn = np.random.default_rng(0).integers(1, 256, (_NUM_DOCUMENTS, MAX_DOCUMENT_BYTES), dtype=np.uint8)
    return tuple(document.tobytes() for document in drawn)


def measure_steps(config: RunConfig, node: NodeConfig, need: MemoryNeed, limit_s: float) -> StepTimes:
    """Make inner steps as a node that owns the first `need.num_owned` shards, for about `limit_s` after a warm-up, at
    least 3 and at most 50 of them. On one device. Raises MachineError if they do not fit into memory after all."""
    torch.set_num_threads(node.threads)
    trainer = Trainer(
        config,
        TokenStream(_random_text(), ByteTokenizer(), digest("spes measured steps")),
        plan=need.plan,
        engine=Engine(config, device=node.device, frozen_format=node.frozen_format, moments=node.moments),
    )
    if node.compile:
        trainer.model.compile_attention()
    trainer.load_start(
        RoundStart(
            round=1,
            global_step=0,
            psi=initial_psi(config.model, config.seed),
            shards=_shards(config),
            owned=tuple(range(need.num_owned)),
        )
    )
    trainer.train(_WARM_UP)
    ends: list[float] = [time.perf_counter()]

    def on_step(report: StepReport) -> None:
        ends.append(time.perf_counter())

    def should_stop() -> bool:
        return len(ends) > _LEAST and ends[-1] - ends[0] > limit_s

    trainer.train(MAX_STEPS, should_stop, on_step)
    return StepTimes(seconds=tuple(after - before for before, after in pairwise(ends)))


def _shards(config: RunConfig) -> Iterator[tuple[int, Tensors]]:
    for shard in range(config.num_shards):
        yield shard, initial_shard(config.model, config.experts_per_shard, config.seed, shard)
