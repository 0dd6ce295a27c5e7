import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[3] / "benchmarks" / "trainer.py"


@pytest.fixture(scope="module")
def trainer(benchmark_of):
    return benchmark_of("trainer")


def test_the_bound_counts_the_products_of_a_step(trainer):
    model, tokens = trainer.LARGE.model, 4096
    layer = 4 * 512 * 512 + 512 * 32 + 4 * 3 * 512 * 512
    products = 3 * 2 * (8 * layer + 32_768 * 512) * tokens
    scores = 7 * 512 * 512 * 8 * tokens
    assert (model.width, model.num_layers) == (512, 8)
    assert trainer.num_operations(trainer.LARGE, 1.0, checkpoint=False) == products + scores
    frozen = 2 * 8 * 4 * 3 * 512 * 512 * tokens
    assert trainer.num_operations(trainer.LARGE, 0.25, checkpoint=False) == products + scores - 0.75 * frozen
    again = 2 * 8 * layer * tokens + 2 * 512 * 512 * 8 * tokens
    assert trainer.num_operations(trainer.LARGE, 1.0, checkpoint=True) == products + scores + again


def test_a_claim_divides_ours_by_the_peer_of_the_same_kind(trainer):
    found = {
        "peer": {"peak_mb": 1000.0, "tokens_per_cpu_s": 100.0},
        "quarter-int8": {"peak_mb": 400.0, "tokens_per_cpu_s": 150.0},
        "sixteenth-int8-checkpointed": {"peak_mb": 1.0, "tokens_per_cpu_s": 1.0},
    }
    memory, speed = trainer.claims(found)
    assert memory == {
        "name": "quarter-int8: peak memory, MB",
        "ours": 400.0,
        "peer": 1000.0,
        "ratio": 0.4,
        "better": "lower",
        "target": 0.42,
    }
    assert (speed["ratio"], speed["better"], speed["target"]) == (1.5, "higher", 1.5)


@pytest.mark.parametrize("side", ["peer", "ours"])
def test_memory_counts_from_after_what_a_first_step_loads(trainer, monkeypatch, side):
    """Transformers' modules and PyTorch's lazy ones are libraries, whoever needs them."""
    seen = []

    def side_of(config, row):
        seen.append("large" if config == trainer.LARGE else "small")
        return lambda: seen.append("step")

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(trainer, side, side_of)
    monkeypatch.setattr(trainer, "_products_per_cpu_s", lambda: 1.0)
    monkeypatch.setattr(trainer, "_status_bytes", lambda key: seen.append(key) or 0)
    row = next(row for row in trainer.ROWS if (side == "peer") == row.name.startswith("peer"))
    trainer.measure(trainer.LARGE, row, steps=1)
    assert seen == ["small", "step", "VmRSS", "large", "step", "step", "VmHWM"]


@pytest.mark.live
@pytest.mark.timeout(900)
def test_rows_are_measured_in_processes_of_their_own_and_written(tmp_path):
    file = tmp_path / "claims.json"
    command = [sys.executable, FILE, "--quick", "--rows", "peer,quarter-int4", "--steps", "1", "--json", file]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    claims = json.loads(file.read_text())
    assert [claim["name"] for claim in claims] == [
        "quarter-int4: peak memory, MB",
        "quarter-int4: tokens per CPU second",
    ]
    assert all(claim["ours"] > 0 and claim["peer"] > 0 and claim["ratio"] > 0 for claim in claims)
