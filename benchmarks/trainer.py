"""Claim: a peer that owns some of the experts trains in far less memory, and faster, than a user's own training loop.

Ours: `Trainer`, with a share of the experts owned and the others frozen in each of the storage formats. Peer:
Transformers' OlmoeForCausalLM of the same shape with its grouped_mm experts, all parameters trained with fused AdamW.
The same batch sizes, threads and allocator; random tokens. Each row is a process of its own: its peak resident memory
over that after a step of a small model, with which either side has loaded its libraries; and CPU seconds and wall time
of some steps after one for warming up. Of several repeats the one with the fewest CPU seconds counts, on both sides
alike: other work on the cores only adds. Beside them the time
that the matrix products alone would take at the speed of a large product, measured in the same process. Linux only.

    python benchmarks/trainer.py [--quick] [--rows NAME,...] [--steps 2] [--repeats 1] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.client.output import prepare_json_file, write_json
from spes_p2p.config import FrozenFormat, ModelConfig, MomentsFormat, RunConfig, TrainingConfig

LARGE = RunConfig(
    model=ModelConfig(
        vocab_size=32_768, width=512, num_layers=8, num_heads=8, num_kv_heads=8, num_experts=32, top_k=4,
        expert_width=512, qk_norm="full", norm_topk_prob=False,
    ),
    training=TrainingConfig(sequence_length=512, batch_sequences=8),
)  # fmt: skip
"""Config M of the claim: 243M parameters."""
QUICK = RunConfig(
    model=LARGE.model.model_copy(update={"vocab_size": 512, "width": 64, "num_layers": 2, "expert_width": 64}),
    training=TrainingConfig(sequence_length=64, batch_sequences=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one process measures."""

    name: str
    owned: float = 1.0
    """Share of the experts that are owned."""
    frozen_format: FrozenFormat = "fp32"
    moments: MomentsFormat = "fp32"
    checkpoint: bool = False
    memory_target: float | None = None
    """Of the peer's peak."""
    speed_target: float | None = None
    """Of the peer's tokens per CPU second."""

    @property
    def peer(self) -> str:
        """The row to compare with."""
        return "peer-checkpointed" if self.checkpoint else "peer"


ROWS = [
    Row(name="peer"),
    Row(name="peer-checkpointed", checkpoint=True),
    Row(name="all"),
    Row(name="quarter-fp32", owned=1 / 4, memory_target=0.42, speed_target=1.5),
    Row(name="quarter-bf16", owned=1 / 4, frozen_format="bf16", memory_target=0.42, speed_target=1.5),
    Row(name="quarter-int8", owned=1 / 4, frozen_format="int8", memory_target=0.42, speed_target=1.5),
    Row(name="quarter-int4", owned=1 / 4, frozen_format="int4", memory_target=0.42, speed_target=1.5),
    Row(name="quarter-int8-moments8", owned=1 / 4, frozen_format="int8", moments="int8", memory_target=0.42),
    Row(name="sixteenth-int8-checkpointed", owned=1 / 16, frozen_format="int8", checkpoint=True, memory_target=0.33),
]


# ---------------------------------------------------------------------------------------------- one row, in its process


class RandomTokens:
    """A stream of tokens like `TokenStream`, from the whole vocabulary, so that all experts have work."""

    def __init__(self, vocab_size: int) -> None:
        import numpy as np

        self._vocab_size, self._generator = vocab_size, np.random.default_rng(0)

    def next_batch(self, num_sequences: int, sequence_length: int) -> Any:
        return self._generator.integers(0, self._vocab_size, (num_sequences, sequence_length + 1))


def ours(config: RunConfig, row: Row) -> Callable[[], None]:
    """A step of our trainer, after a round's start."""
    from spes_p2p.testing.training import genesis_round
    from spes_p2p.training.plan import StepPlan
    from spes_p2p.training.trainer import Trainer

    tokens: Any = RandomTokens(config.model.vocab_size)
    trainer = Trainer(
        config,
        tokens,
        frozen_format=row.frozen_format,
        moments=row.moments,
        plan=StepPlan(micro_sequences=config.training.batch_sequences, checkpoint=row.checkpoint),
    )
    trainer.load_start(genesis_round(config, tuple(range(round(row.owned * config.num_shards)))))

    def step() -> None:
        assert trainer.train(1).num_steps == 1

    return step


def peer(config: RunConfig, row: Row) -> Callable[[], None]:
    """A step of a plain training loop over Transformers' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from spes_p2p.model.transformers_names import transformers_config

    training = config.training
    given = transformers_config(config.model, training.sequence_length)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # untyped in transformers
        AutoConfig.for_model(**given), attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    model.config.use_cache = False
    model.train()
    if row.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.peak_lr, betas=(training.beta1, training.beta2), weight_decay=0.1, fused=True
    )
    stream = RandomTokens(config.model.vocab_size)

    def step() -> None:
        tokens = torch.from_numpy(stream.next_batch(training.batch_sequences, training.sequence_length))[:, :-1]
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(config: RunConfig, row: Row, steps: int) -> dict[str, float]:
    """Run the row here and now."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    made = peer if row.name.startswith("peer") else ours
    products_per_s = _products_per_cpu_s()
    made(QUICK, row)()
    gc.collect()
    libraries = _status_bytes("VmRSS")
    step = made(config, row)
    step()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    cpu_s, wall_s = (time.process_time() - cpu_s) / steps, (time.perf_counter() - wall_s) / steps
    return {
        "peak_mb": (_status_bytes("VmHWM") - libraries) / 1e6,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "tokens_per_cpu_s": config.training.batch_tokens / cpu_s,
        "bound_s": num_operations(config, row.owned, row.checkpoint) / products_per_s,
    }


def _products_per_cpu_s(size: int = 1024) -> float:
    """Floating-point operations per CPU second of a matrix product by the faster library, the best of some."""
    import torch

    from spes_p2p.model.products import product

    left, right, out = (torch.ones(size, size) for _ in range(3))
    best = float("inf")
    for _ in range(6):
        began = time.process_time()
        product(left, right, out=out)
        best = min(best, time.process_time() - began)
    return 2 * size**3 / best


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def num_operations(config: RunConfig, owned: float, checkpoint: bool) -> float:
    """Floating-point operations of a step's matrix products: what no implementation can leave out.

    Forward 2 per weight and token; backward as many for the inputs and as many for the weights that are trained.
    Attention in the style of FlashAttention: 2 products forward, 5 backward, over the half that a token may see.
    Checkpointing makes the layers' forward pass twice. Tokens are taken to be spread evenly over the experts.
    """
    model, training = config.model, config.training
    heads = (model.num_heads + model.num_kv_heads) * model.resolved_head_dim
    attention = 2 * model.width * heads + model.width * model.num_experts
    experts = model.top_k * 3 * model.width * model.expert_width
    scores = training.sequence_length * model.num_heads * model.resolved_head_dim
    head = model.vocab_size * model.width
    layer_forward = 2 * (attention + experts) + 2 * scores
    layer_backward = 2 * (attention + experts) + 2 * (attention + owned * experts) + 5 * scores
    per_token = model.num_layers * (layer_forward * (2 if checkpoint else 1) + layer_backward) + 6 * head
    return float(per_token) * training.batch_tokens


# ------------------------------------------------------------------------------------------------------- all the rows


def run_row(row: Row, options: argparse.Namespace) -> dict[str, float]:
    """Measure a row in a process of its own. Raises SystemExit if that fails."""
    threads = str(options.threads)
    command = [sys.executable, __file__, "--in-process", row.name, "--steps", str(options.steps)]
    done = subprocess.run(
        command + ["--quick"] * options.quick,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"row {row.name} failed with {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def claims(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Every row of ours against its peer's, where both were measured. `ratio` is ours / peer, `target` its goal."""
    made = []
    for row in ROWS:
        if row.name.startswith("peer") or row.name not in found or row.peer not in found:
            continue
        mine, theirs = found[row.name], found[row.peer]
        for what, key, better, target in (
            ("peak memory, MB", "peak_mb", "lower", row.memory_target),
            ("tokens per CPU second", "tokens_per_cpu_s", "higher", row.speed_target),
        ):
            made.append(
                {
                    "name": f"{row.name}: {what}",
                    "ours": round(mine[key], 1),
                    "peer": round(theirs[key], 1),
                    "ratio": round(mine[key] / theirs[key], 3),
                    "better": better,
                    "target": target,
                }
            )
    return made


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape: shows that it runs, nothing else")
    parser.add_argument("--rows", default="", help=f"some of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed, after one that is not")
    parser.add_argument("--repeats", type=int, default=1, help="processes per row")
    parser.add_argument("--threads", type=int, default=1, help="threads of every row")
    parser.add_argument("--json", type=Path, help="write the comparison here")
    parser.add_argument("--in-process", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = QUICK if options.quick else LARGE
    named = {row.name: row for row in ROWS}
    if options.in_process:
        print(json.dumps(measure(config, named[options.in_process], options.steps)))
        return
    wanted = options.rows.split(",") if options.rows else list(named)
    if unknown := [name for name in wanted if name not in named]:
        parser.error(f"there is no row {unknown[0]}")
    prepare_json_file(options.json)
    found: dict[str, dict[str, float]] = {}
    print(f"{'row':28} {'peak MB':>8} {'CPU s':>7} {'wall s':>7} {'tokens/CPU s':>13} {'bound s':>8}")
    for _ in range(options.repeats):
        for name in wanted:
            one = run_row(named[name], options)
            if name not in found or one["cpu_s"] < found[name]["cpu_s"]:
                found[name] = one
            print(
                f"{name:28} {one['peak_mb']:8.0f} {one['cpu_s']:7.2f} {one['wall_s']:7.2f}"
                f" {one['tokens_per_cpu_s']:13.0f} {one['bound_s']:8.2f}",
                flush=True,
            )
    made = claims(found)
    for claim in made:
        print(f"{claim['name']}: {claim['ours']} / {claim['peer']} = {claim['ratio']} (target {claim['target']})")
    if options.json is not None:
        write_json(options.json, made)


if __name__ == "__main__":
    main()
