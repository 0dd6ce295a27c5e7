"""Claim: SPES learns nearly as much from the same tokens as one trainer that owns everything: within 5 % in loss.

Ours: SPES, with the trainer, codecs, means and merge of a swarm, in one process (`spes_p2p.training.lab`). Peers, with
the same trainer: centralised, DiLoCo, FedAvg of everything, NoLoCo; and SPES without its merge, and with Nesterov's
momentum. Four peers, two owners for each expert, text that every machine has: dealt alike (iid), or one kind to each
peer (kinds). Methods have learning rates and H of their own, so that each is near its best.

A difference is claimed only if it is larger than twice the spread of the seeds. Each run is a process of its own on one
thread. With `--runs FILE` finished runs are kept, and not made again.

    python benchmarks/learning.py [--seeds 3] [--texts iid,kinds] [--methods ...] [--steps N] [--jobs 2]
                                  [--set KEY=JSON ...] [--runs FILE] [--png DIR] [--json FILE]

`--set` tries another setting in all runs, such as `--set run.training.peak_lr=0.006` (the fields of `Experiment`).
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from pydantic import ValidationError

from spes_p2p.client.output import prepare_json_file, say, write_json
from spes_p2p.config import (
    MergeConfig,
    ModelConfig,
    OuterConfig,
    ProtocolConfig,
    RunConfig,
    TrainingConfig,
    first_problem,
)
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.training.lab.curves import draw_curves
from spes_p2p.training.lab.experiment import Experiment, Method, Outcome, Text
from spes_p2p.training.lab.running import conduct
from spes_p2p.training.lab.table import Difference, Row, difference, rows_of

STEPS = 600
"""What fits two minutes of one core."""
MODEL = ModelConfig(width=32, num_layers=2, num_heads=2, num_kv_heads=2, expert_width=32)
"""74,000 parameters, so that a run of two minutes has 100 tokens for each: with few, the loss falls steeply to the end,
and whoever makes less of the same tokens is far behind."""
SEQUENCE_LENGTH = 64
BATCH_SEQUENCES = 48
OWNERS_PER_SHARD = 2
TEXT_BYTES = 1_000_000
OUTER = OuterConfig(rule="nesterov", learning_rate=0.9, momentum=0.1)
"""DiLoCo's own 0.7 and 0.9 are for H = 500; with 60 rounds of 10 steps, more momentum did harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What each method has of its own, as far as it was found by trying: docs/LOG.md."""

    inner_steps: int = 2
    peak_lr: float = 0.01
    psi_lr_ratio: float = 2.0


ALL_SEEDS: frozenset[Method] = frozenset({"centralised", "spes", "spes-no-merge", "diloco"})
"""The other methods are run with the first seed alone."""
PACES: dict[Method, Pace] = {
    "centralised": Pace(peak_lr=0.012, psi_lr_ratio=1),
    "fedavg": Pace(peak_lr=0.016, psi_lr_ratio=1),
    "diloco": Pace(inner_steps=10, peak_lr=0.012, psi_lr_ratio=1),
    "spes-nesterov": Pace(inner_steps=10, psi_lr_ratio=1),
}
"""Of methods that differ from SPES. Where all weights are averaged, or none, all have one rate."""
MOST_BEHIND = 1.05
"""The target: SPES's loss in units of the centralised one."""
COMPARED: tuple[tuple[Method, Method], ...] = (
    ("spes", "centralised"),
    ("spes", "diloco"),
    ("spes", "fedavg"),
    ("spes", "spes-no-merge"),
    ("spes-nesterov", "spes"),
    ("spes-nesterov", "centralised"),
    ("noloco", "spes-no-merge"),
    ("diloco", "centralised"),
)


def experiment(method: Method, text: Text, seed: int, num_steps: int) -> Experiment:
    """The settings of one run: those of docs/learning.md."""
    pace = PACES.get(method, Pace())
    training = TrainingConfig(
        sequence_length=SEQUENCE_LENGTH,
        batch_sequences=BATCH_SEQUENCES,
        inner_steps=((0, pace.inner_steps),),
        total_steps=num_steps,
        warmup_steps=num_steps // 10,
        peak_lr=pace.peak_lr,
        psi_lr_ratio=pace.psi_lr_ratio,
        merge=MergeConfig(alpha=0.1, top_k=4, warmup_steps=num_steps // 2, interval_steps=20),
    )
    return Experiment(
        method=method,
        text=text,
        seed=seed,
        owners_per_shard=OWNERS_PER_SHARD,
        text_bytes=TEXT_BYTES,
        document_bytes=SEQUENCE_LENGTH,
        outer=OUTER,
        evaluate_every=max(1, num_steps // 8),
        run=RunConfig(model=MODEL, training=training, protocol=ProtocolConfig(parts=8), held_out_bytes=48 * 1024),
    )


def changed(item: Experiment, changes: Sequence[str]) -> Experiment:
    """The experiment with other settings, each a dotted name, `=` and JSON. Raises SystemExit for one that is wrong."""
    fields = item.model_dump(mode="json")
    for change in changes:
        name, _, value = change.partition("=")
        *path, last = name.split(".")
        try:
            inner = functools.reduce(operator.getitem, path, fields)
            inner[last] = json.loads(value)
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(f"--set {change}: not NAME=JSON of an experiment ({error})") from error
    try:
        return Experiment.model_validate(fields)
    except ValidationError as error:
        raise SystemExit(f"--set: {first_problem(error)}") from error


def experiments(
    methods: Sequence[Method], texts: Sequence[Text], num_seeds: int, num_steps: int
) -> Iterator[Experiment]:
    """All runs, the first seed of everything first."""
    for seed in range(num_seeds):
        for text in texts:
            for method in methods:
                if seed == 0 or method in ALL_SEEDS:
                    yield experiment(method, text, seed, num_steps)


def finished(runs: Path | None) -> dict[str, Outcome]:
    """Key -> outcome of the runs that the file holds, one JSON document a line."""
    if runs is None or not runs.exists():
        return {}
    outcomes = (Outcome.model_validate_json(line) for line in runs.read_text().splitlines() if line)
    return {outcome.experiment.key: outcome for outcome in outcomes}


def run_all(wanted: Sequence[Experiment], runs: Path | None, jobs: int) -> list[Outcome]:
    """Outcomes of all experiments, of which those in the file are not made again. A broken run ends the benchmark; what
    was finished before is in the file."""
    known = finished(runs)
    missing = [item for item in wanted if item.key not in known]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run_in_process, item) for item in missing]):
            outcome = done.result()
            known[outcome.experiment.key] = outcome
            say(f"{_title(outcome.experiment):34} {outcome.last:.4f}  {outcome.cpu_seconds:5.0f} CPU s")
            if runs is not None:
                with runs.open("a") as file:
                    file.write(outcome.model_dump_json() + "\n")
    return [known[item.key] for item in wanted]


def run_in_process(item: Experiment) -> Outcome:
    """One experiment in a process of its own, on one thread. Raises SystemExit with what it said if it fails."""
    done = subprocess.run(
        [sys.executable, __file__, "--one"],
        input=item.model_dump_json(),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{_title(item)} failed:\n{done.stderr}")
    return Outcome.model_validate_json(done.stdout)


def run_here() -> None:
    """What the process of one run does: experiment on standard input, outcome on standard output."""
    torch.set_num_threads(1)
    item = Experiment.model_validate_json(sys.stdin.read())
    print(conduct(item, MemoryBlobs()).model_dump_json())


def print_rows(rows: Sequence[Row]) -> None:
    say(f"\n{'text':6} {'method':14} {'seeds':>5} {'mean':>7} {'spread':>7} {'behind':>7}  against centralised")
    for row in rows:
        against = difference(rows, row.text, row.method, "centralised")
        behind = f"{'-':>7}"
        if against is not None and row.method != "centralised":
            behind = f"{against.relative:+7.1%}  {against.verdict}"
        spread = f"{row.spread:7.4f}" if row.spread is not None and len(row.losses) > 1 else f"{'-':>7}"
        say(f"{row.text:6} {row.method:14} {len(row.losses):5} {row.mean:7.4f} {spread} {behind}")
    say("\nnats per byte of held-out text; one seed borrows the largest spread of its text")


def differences(rows: Sequence[Row]) -> list[Difference]:
    """The comparisons of the claim, as far as both sides were run."""
    found = [difference(rows, text, ours, peer) for text in get_args(Text) for ours, peer in COMPARED]
    return [item for item in found if item is not None]


def claims(items: Iterable[Difference]) -> list[dict[str, object]]:
    """What `--json` holds. The target of SPES against centralised is 5 %; the others have none."""
    return [
        {
            "name": f"{item.ours.method} against {item.peer.method}, {item.ours.text}, nats per byte of held-out text",
            "ours": round(item.ours.mean, 4),
            "peer": round(item.peer.mean, 4),
            "ratio": round(item.ours.mean / item.peer.mean, 4),
            "better": "lower",
            "target": MOST_BEHIND
            if item.peer.method == "centralised" and item.ours.method.startswith("spes")
            else None,
        }
        for item in items
    ]


def _title(item: Experiment) -> str:
    return f"{item.text}, {item.method}, seed {item.seed}"


def _names(text: str, known: Iterable[str]) -> list[str]:
    names, allowed = text.split(","), list(known)
    if wrong := [name for name in names if name not in allowed]:
        raise SystemExit(f"there is no {wrong[0]}; there are {', '.join(allowed)}")
    return names


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--texts", default=",".join(get_args(Text)))
    parser.add_argument("--methods", default=",".join(get_args(Method)))
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="another setting, in all runs")
    parser.add_argument("--runs", type=Path, help="JSON lines of finished runs: read, and added to")
    parser.add_argument("--png", type=Path, help="folder for the curves")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_here()
        return
    prepare_json_file(options.json)
    for folder in filter(None, (options.png, options.runs and options.runs.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    methods, texts = _names(options.methods, get_args(Method)), _names(options.texts, get_args(Text))
    planned = experiments(methods, texts, options.seeds, options.steps)  # type: ignore[arg-type]  # checked names
    wanted = [changed(item, options.set) for item in planned]
    outcomes = run_all(wanted, options.runs, options.jobs)
    rows = rows_of(outcomes)
    print_rows(rows)
    for item in differences(rows):
        say(f"{item.ours.text:6} {item.ours.method} against {item.peer.method}: {item.relative:+.1%}, {item.verdict}")
    if options.png is not None:
        draw_curves(outcomes, options.png)
    if options.json is not None:
        write_json(options.json, claims(differences(rows)))


if __name__ == "__main__":
    main()
