import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "memory.py"
CUDA_ITSELF_BYTES = 0.5e9


@pytest.fixture(scope="module")
def memory(benchmark_of):
    return benchmark_of("memory")


def test_the_shapes_are_as_large_as_their_names_say(memory):
    values = {}
    for config in memory.LARGE:
        shard = memory.num_shard_values(config.model, config.experts_per_shard)
        values[config.name] = (memory.num_psi_values(config.model) + config.num_shards * shard) / 1e9
    assert values == pytest.approx(
        {"2B class, 16 shards": 1.99, "7B, 4 shards": 7.333, "7B, 16 shards": 7.333, "9B, 4 shards": 9.431}, abs=0.01
    )


@pytest.mark.parametrize(
    ("name", "frozen_format", "card_bytes"),
    [("7B, 16 shards", "int8", 24 * 2**30), ("2B class, 16 shards", "int4", 8 * 2**30)],
)
def test_the_cards_that_the_documentation_names_are_large_enough(memory, name, frozen_format, card_bytes):
    config = next(config for config in memory.LARGE if config.name == name)
    node = memory.NodeConfig(data_dir=Path(), device="cuda:0", frozen_format=frozen_format, moments="int8")
    need = memory.memory_need(config, node, 1, memory.StepPlan(micro_sequences=1, checkpoint=True))
    # as `join` reckons: a tenth of what is free is left to others
    assert need.device.peak_bytes <= 0.9 * (card_bytes - CUDA_ITSELF_BYTES)


def test_the_table_of_the_documentation_is_what_the_command_prints(memory):
    done = subprocess.run([sys.executable, FILE, "--shapes"], capture_output=True, text=True, check=True)
    table = done.stdout.split("\n\n")[0]
    assert table in (FILE.parents[1] / "docs" / "memory.md").read_text()
