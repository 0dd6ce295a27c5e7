"""A model spread over the GPUs that there are, by NCCL: `make test-gpu`. With one GPU, over that one."""

from pathlib import Path

import pytest
import torch

from spes_p2p.config import ModelConfig, TrainingConfig
from spes_p2p.node.ranks import RankProcesses
from spes_p2p.testing.ranks import largest_difference, trainer_on
from spes_p2p.testing.training import genesis_round, tiny_run
from spes_p2p.training.engine import Engine
from spes_p2p.training.spread import SpreadEngine
from spes_p2p.training.state import restore_state, save_state

pytestmark = pytest.mark.gpu

CONFIG = tiny_run(
    model=ModelConfig(width=128, num_layers=3, num_heads=4, num_kv_heads=2, num_experts=8, top_k=2, expert_width=128),
    training=TrainingConfig(sequence_length=128, batch_sequences=8, warmup_steps=4, total_steps=100, peak_lr=3e-3),
    experts_per_shard=2,
)


@pytest.fixture
def team(tmp_path: Path):
    count = min(2, torch.cuda.device_count())
    processes = RankProcesses([f"cuda:{index}" for index in range(count)], tmp_path)
    processes.meet()
    yield processes
    processes.close()
    processes.ranks.close()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_ranks_follow_one_gpu_within_bf16(team: RankProcesses, checkpoint: bool) -> None:
    formats = {"frozen_format": "int8", "moments": "int8"}
    micro = 8 // team.ranks.count
    spread = trainer_on(SpreadEngine(CONFIG, team, **formats), micro, checkpoint)
    alone = trainer_on(Engine(CONFIG, device="cuda:0", **formats), micro, checkpoint)
    losses: list[list[float]] = [[], []]
    for trainer, seen in zip((spread, alone), losses, strict=True):
        trainer.load_start(genesis_round(CONFIG, (0, 1)))
        trainer.train(10, on_step=lambda report, seen=seen: seen.append(report.loss))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_checkpoint_of_gpus_is_one_of_a_cpu(team: RankProcesses) -> None:
    spread = trainer_on(SpreadEngine(CONFIG, team))
    spread.load_start(genesis_round(CONFIG, (0, 3)))
    spread.train(2)
    on_cpu = trainer_on(Engine(CONFIG))
    restore_state(on_cpu, save_state(spread))
    assert largest_difference(on_cpu, spread) == 0.0
