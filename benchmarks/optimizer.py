"""Claim: the optimizer's step is as quick as PyTorch's fused AdamW, and 8-bit moments take a quarter of the memory.

Ours: `NamedAdamW` with fp32 and with int8 moments, clipping included. Peer: `torch.optim.AdamW(fused=True)` after
`clip_grad_norm_`. 31 million parameters in the shapes of a model of width 512 with 512-wide experts; the gradients are
clipped in every step. CPU seconds, the best of some steps, because the cores may be shared.

    python benchmarks/optimizer.py [--steps 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.client.output import write_json
from spes_p2p.config import MomentsFormat, TrainingConfig
from spes_p2p.training.optim import NamedAdamW

SHAPES = [(512, 512)] * 90 + [(8192, 512)] + [(1024, 1024)] * 3 + [(512,)] * 40
CONFIG = TrainingConfig()
SPEED_TARGET, INT8_SPEED_TARGET, MEMORY_TARGET = 1.1, 10.0, 0.26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    theirs_s, theirs_bytes = _peer(arguments.steps)
    fp32_s, _ = _ours("fp32", arguments.steps)
    int8_s, int8_bytes = _ours("int8", arguments.steps)
    rows = [
        _row("step with fp32 moments against torch's fused AdamW, CPU s", fp32_s, theirs_s, SPEED_TARGET),
        _row("step with int8 moments against ours with fp32, CPU s", int8_s, fp32_s, INT8_SPEED_TARGET),
        _row("int8 moments against torch's, bytes", int8_bytes, theirs_bytes, MEMORY_TARGET),
    ]
    for row in rows:
        print(f"{row['name']}: {row['ours']:.4g} : {row['peer']:.4g} = {row['ratio']:.3f} (target {row['target']})")
    if arguments.json:
        write_json(arguments.json, rows)


def _row(name: str, ours: float, peer: float, target: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "peer": peer, "ratio": ours / peer, "better": "lower", "target": target}


def _ours(moments: MomentsFormat, num_steps: int) -> tuple[float, float]:
    weights = {str(number): nn.Parameter(value) for number, value in enumerate(_values(0.02))}
    optimizer = NamedAdamW(CONFIG, weights, moments)
    seconds = _best(list(weights.values()), lambda: optimizer.step(1e-3), num_steps)
    return seconds, sum(tensor.nbytes for tensor in optimizer.state_tensors())


def _peer(num_steps: int) -> tuple[float, float]:
    weights = [nn.Parameter(value) for value in _values(0.02)]
    optimizer = torch.optim.AdamW(
        weights,
        lr=1e-3,
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.adam_eps,
        weight_decay=CONFIG.weight_decay,
        fused=True,
    )

    def step() -> None:
        nn.utils.clip_grad_norm_(weights, CONFIG.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _best(weights, step, num_steps)
    kept = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return seconds, sum(tensor.nbytes for tensor in kept)


def _values(size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES]


def _best(weights: list[nn.Parameter], step: Callable[[], object], num_steps: int) -> float:
    """CPU seconds of the quickest step after the first, which makes the moments."""
    gradients = _values(1e-2)
    seconds = []
    for _ in range(1 + num_steps):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
