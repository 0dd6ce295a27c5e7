"""Learning rate as a pure function of the run's global step, so that all peers agree on it."""

from __future__ import annotations

import math

from spes_p2p.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Rate of one inner step: linear from min_lr_ratio * peak to the peak over `warmup_steps`, then a cosine down to
    min_lr_ratio * peak at `total_steps`, and constant after that.

    `step` is the certificate's global step plus the inner steps made since. Raises ValueError if it is negative.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    low = config.min_lr_ratio
    if step < config.warmup_steps:
        return config.peak_lr * (low + (1.0 - low) * step / config.warmup_steps)
    length = config.total_steps - config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / length) if length > 0 else 1.0
    return config.peak_lr * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress)))
