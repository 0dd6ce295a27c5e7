"""Claim: what a node's training needs in memory is known before it starts, within a tenth.

Predicted: `training.memory.memory_need`, and what the matrix library takes (`model.products.library_bytes`). Measured:
the trainer with the files that a node gives it, in a process of its own: it loads a start from a blob store, makes two
steps, publishes, and writes its checkpoints; the most anonymous memory it had, sampled every 2 ms, over what it had
after its imports and a round of a tiny model. Files that are mapped (blobs, checkpoints) are not counted: the kernel
takes their pages back when it needs them. Linux only.

    python benchmarks/memory.py [--rows NAME,...] [--threads 1] [--json FILE]
    python benchmarks/memory.py --shapes      the table of docs/memory.md: large models, reckoned
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.client.output import prepare_json_file, write_json
from spes_p2p.config import FrozenFormat, ModelConfig, MomentsFormat, NodeConfig, RunConfig, TrainingConfig
from spes_p2p.model.products import library_bytes
from spes_p2p.model.shards import num_psi_values, num_shard_values
from spes_p2p.training.kept import layer_bytes
from spes_p2p.training.memory import HOLES, MemoryNeed, memory_need
from spes_p2p.training.plan import StepPlan, whole_batch

TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration."""

    name: str
    model: ModelConfig
    sequence_length: int
    batch_sequences: int
    owned: int
    """Experts; a shard has one."""
    frozen_format: FrozenFormat = "int8"
    moments: MomentsFormat = "fp32"
    micro_sequences: int = 0
    """0: the whole batch."""
    checkpoint: bool = False
    num_ranks: int = 1
    """Processes that share the model, on this machine's CPU. Measured is the first one."""

    @property
    def run(self) -> RunConfig:
        """Two inner steps a round."""
        training = TrainingConfig(sequence_length=self.sequence_length, batch_sequences=self.batch_sequences)
        return RunConfig(model=self.model, training=training)

    @property
    def plan(self) -> StepPlan:
        """How a step is cut."""
        whole = whole_batch(self.run.training, self.num_ranks)
        return StepPlan(micro_sequences=self.micro_sequences or whole.micro_sequences, checkpoint=self.checkpoint)

    def need(self) -> MemoryNeed:
        """The prediction."""
        node = NodeConfig(
            data_dir=Path(),
            more_devices=("cpu",) * (self.num_ranks - 1),
            frozen_format=self.frozen_format,
            moments=self.moments,
        )
        return memory_need(self.run, node, self.owned, self.plan)


def _model(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"num_kv_heads": fields["num_heads"], **fields})


MIDDLE = _model(vocab_size=8192, width=512, num_layers=4, num_heads=8, num_experts=16, top_k=2, expert_width=512)
ROWS = [
    Row(name="quarter-int8", model=MIDDLE, sequence_length=512, batch_sequences=4, owned=4),
    Row(
        name="one-int4-checkpointed", model=MIDDLE, sequence_length=512, batch_sequences=4, owned=1,
        frozen_format="int4", micro_sequences=1, checkpoint=True,
    ),
    Row(name="all-owned", model=MIDDLE, sequence_length=256, batch_sequences=4, owned=16),
    Row(
        name="grouped-bf16-moments8", sequence_length=256, batch_sequences=8, owned=8, frozen_format="bf16",
        moments="int8",
        model=_model(
            vocab_size=32_768, width=256, num_layers=8, num_heads=8, num_kv_heads=2, num_experts=32, top_k=4,
            expert_width=256,
        ),
    ),
    Row(
        name="wide-fp32-halves", sequence_length=256, batch_sequences=4, owned=2, frozen_format="fp32",
        micro_sequences=2,
        model=_model(
            vocab_size=16_384, width=768, num_layers=4, num_heads=12, num_experts=8, top_k=2, expert_width=1024,
            qk_norm="full",
        ),
    ),
    Row(
        name="vocabulary-moments8-checkpointed", sequence_length=512, batch_sequences=4, owned=2, moments="int8",
        micro_sequences=2, checkpoint=True,
        model=_model(
            vocab_size=65_536, width=512, num_layers=3, num_heads=8, num_experts=8, top_k=2, expert_width=512
        ),
    ),
    Row(
        name="long-int4", sequence_length=2048, batch_sequences=2, owned=1, frozen_format="int4", micro_sequences=1,
        model=_model(
            vocab_size=8192, width=384, num_layers=6, num_heads=6, num_experts=16, top_k=4, expert_width=512
        ),
    ),
    Row(name="two-ranks-int8", model=MIDDLE, sequence_length=512, batch_sequences=4, owned=4, num_ranks=2),
    Row(
        name="two-ranks-vocabulary-halves", sequence_length=256, batch_sequences=8, owned=2, micro_sequences=2,
        num_ranks=2, moments="int8",
        model=_model(
            vocab_size=32_768, width=512, num_layers=4, num_heads=8, num_experts=8, top_k=2, expert_width=1024
        ),
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- one row, in its process


class Sampler:
    """Watches this process's anonymous memory; `peak_bytes` is the most since its block began."""

    def __init__(self) -> None:
        self.peak_bytes = self.began_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self.began_bytes = self.peak_bytes = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def prepare(row: Row, folder: Path) -> None:
    """Genesis of the row's run in a blob store, and what its start is made of."""
    import msgspec

    from spes_p2p.storage.blobs import DiskBlobs
    from spes_p2p.training.genesis import genesis_start, make_genesis

    spec = genesis_start(make_genesis(row.run, DiskBlobs(folder / "blobs")))
    (folder / "start.json").write_bytes(msgspec.json.encode(spec))


def measure(row: Row, folder: Path) -> int:
    """Bytes. The same calls as in `node.trainer_service`, without its text and its choice of a plan."""
    import msgspec

    from spes_p2p.digests import digest
    from spes_p2p.node.trainer_files import CheckpointFiles
    from spes_p2p.storage.blobs import DiskBlobs
    from spes_p2p.testing.ranks import SPREAD_RUN, CpuTeam, trainer_on
    from spes_p2p.testing.training import genesis_round, tiny_run, tiny_trainer
    from spes_p2p.training.data import TokenStream
    from spes_p2p.training.engine import Engine
    from spes_p2p.training.publish import publish
    from spes_p2p.training.start import StartReader, StartSpec
    from spes_p2p.training.state import rest_on, stream_state
    from spes_p2p.training.tokenizer import ByteTokenizer
    from spes_p2p.training.trainer import RoundStart, Trainer

    warm = tiny_trainer()
    warm.load_start(genesis_round(tiny_run()))
    warm.train(1)
    # random letters: all experts have work
    text = random.Random(0).choices(range(33, 127), k=200_000)
    spec = msgspec.json.decode((folder / "start.json").read_bytes(), type=StartSpec)
    store, files = DiskBlobs(folder / "blobs"), CheckpointFiles(folder / "state")

    def save() -> None:
        state = stream_state(trainer)
        rest_on(trainer, files.save(state.size_bytes, state.pieces()))

    team = None
    if row.num_ranks > 1:
        team = CpuTeam(folder, row.num_ranks)
        trainer_on(team.engine()).load_start(genesis_round(SPREAD_RUN))

    def engine() -> Engine:
        if team is None:
            return Engine(row.run, frozen_format=row.frozen_format, moments=row.moments)
        return team.engine(row.run, frozen_format=row.frozen_format, moments=row.moments)

    with Sampler() as sampler:
        stream = TokenStream([bytes(text)], ByteTokenizer(), digest("memory"))
        trainer = Trainer(row.run, stream, plan=row.plan, engine=engine())
        reader = StartReader(row.run, store, spec)
        trainer.load_start(
            RoundStart(
                round=1,
                global_step=0,
                psi=reader.psi_where_it_lies(),
                shards=reader.starts(),
                owned=tuple(range(row.owned)),
            )
        )
        save()
        trainer.train(2)
        publish(trainer, store, reader.row_tensor)
        save()
    if team is not None:
        team.close()
    return sampler.peak_bytes - sampler.began_bytes


# ---------------------------------------------------------------------------------------------------- the large shapes

SEQUENCES = 8
"""Of a step; micro-batches of one."""


def _large(name: str, experts_per_shard: int, length: int, **model: Any) -> RunConfig:
    training = TrainingConfig(sequence_length=length, batch_sequences=SEQUENCES)
    return RunConfig(name=name, experts_per_shard=experts_per_shard, model=_model(**model), training=training)


SHAPE_2B = {
    "vocab_size": 151_665, "width": 1024, "num_layers": 16, "num_heads": 16, "num_experts": 32, "top_k": 4,
    "expert_width": 1024,
}  # fmt: skip
"""About 2B values; ours, in the style of the published ones."""
SHAPE_7B = {
    "vocab_size": 151_665, "width": 2048, "num_layers": 16, "num_heads": 16, "num_experts": 32, "top_k": 4,
    "expert_width": 2048,
}  # fmt: skip
SHAPE_9B = {
    "vocab_size": 151_936, "width": 2048, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
    "num_experts": 8, "top_k": 2, "expert_width": 6144,
}  # fmt: skip
LARGE = [
    _large("2B class, 16 shards", 2, 2048, **SHAPE_2B),
    _large("7B, 4 shards", 8, 2048, **SHAPE_7B),
    _large("7B, 16 shards", 2, 2048, **SHAPE_7B),
    _large("9B, 4 shards", 2, 4096, **SHAPE_9B),
]


def published_bytes(config: RunConfig, num_owned: int, frozen_bytes: int) -> int:
    """A training loop in the style of the published code, one sequence at a time, nothing checkpointed, bf16 products:
    16 bytes for each trained value (weight, gradient, two moments), what the layers keep, logits of all tokens in fp32
    and their gradient. Copies of weights in bf16, and gradients of frozen experts that are made and thrown away, are
    left out: in favour of the others."""
    model, length = config.model, config.training.sequence_length
    experts = config.num_shards * num_shard_values(model, config.experts_per_shard)
    own = num_owned * num_shard_values(model, config.experts_per_shard)
    trained = num_psi_values(model) + own
    kept = model.num_layers * layer_bytes(model, length, on_gpu=True).kept
    logits = 2 * 4 * length * model.vocab_size
    return math.ceil((16 * trained + frozen_bytes * (experts - own) + kept + logits) * (1 + HOLES))


def print_shapes() -> None:
    """Markdown: GB per node, of the GPU and, for ours, of main memory."""
    print("| shape | values | DiLoCo | SPES, frozen fp32 | SPES, frozen bf16 | ours, int8 | ours, int4 |")
    print("|---|---|---|---|---|---|---|")
    plan = StepPlan(micro_sequences=1, checkpoint=True)
    for config in LARGE:
        model = config.model
        values = num_psi_values(model) + config.num_shards * num_shard_values(model, config.experts_per_shard)
        cells = [published_bytes(config, config.num_shards, 0)]
        cells += [published_bytes(config, 1, size) for size in (4, 2)]
        texts = [f"{cell / 1e9:.1f}" for cell in cells]
        for frozen_format in ("int8", "int4"):
            node = NodeConfig(data_dir=Path(), device="cuda:0", frozen_format=frozen_format, moments="int8")
            need = memory_need(config, node, 1, plan)
            host = 0 if need.host is None else need.host.peak_bytes
            texts.append(f"{need.device.peak_bytes / 1e9:.1f} + {host / 1e9:.1f} host")
        print(f"| {config.name} | {values / 1e9:.2f}B | {' | '.join(texts)} |")
    for config in LARGE:
        node = NodeConfig(data_dir=Path(), device="cuda:0", frozen_format="int8", moments="int8")
        print(f"\n{config.name}, ours, int8:\n")
        for where, what, size in memory_need(config, node, 1, plan).rows():
            print(f"    {where:8}{what:60}{size / 1e9:8.2f} GB")


# ------------------------------------------------------------------------------------------------------- all the rows


def run_row(row: Row, threads: int) -> float:
    """Measure a row in a process of its own, in MB. Raises SystemExit if that fails."""
    with tempfile.TemporaryDirectory() as name:
        prepare(row, Path(name))
        done = subprocess.run(
            [sys.executable, __file__, "--in-process", row.name, "--folder", name],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"row {row.name} failed with {done.returncode}")
    return float(done.stdout.splitlines()[-1]) / 1e6


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help=f"some of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the comparison here")
    parser.add_argument("--shapes", action="store_true", help="print the table of large models and nothing else")
    parser.add_argument("--in-process", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    named = {row.name: row for row in ROWS}
    if options.in_process:
        print(measure(named[options.in_process], options.folder))
        return
    if options.shapes:
        print_shapes()
        return
    wanted = options.rows.split(",") if options.rows else list(named)
    if unknown := [name for name in wanted if name not in named]:
        parser.error(f"there is no row {unknown[0]}")
    prepare_json_file(options.json)
    made: list[dict[str, Any]] = []
    print(f"{'row':34} {'predicted MB':>12} {'measured MB':>12} {'ratio':>6}  largest phase")
    for name in wanted:
        need = named[name].need()
        predicted, measured = (need.device.peak_bytes + library_bytes()) / 1e6, run_row(named[name], options.threads)
        ratio = predicted / measured
        print(f"{name:34} {predicted:12.0f} {measured:12.0f} {ratio:6.3f}  {need.device.peak_phase[0]}", flush=True)
        made.append(
            {
                "name": f"{name}: memory predicted over measured, MB",
                "ours": round(predicted, 1),
                "peer": round(measured, 1),
                "ratio": round(ratio, 3),
                "better": "lower",
                "target": 1 + TOLERANCE,
            }
        )
    off = [claim["name"] for claim in made if abs(claim["ratio"] - 1) > TOLERANCE]
    print(f"{len(made) - len(off)} of {len(made)} within {TOLERANCE:.0%}")
    if options.json is not None:
        write_json(options.json, made)


if __name__ == "__main__":
    main()
