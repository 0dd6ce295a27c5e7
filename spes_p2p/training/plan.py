"""How one inner step is cut to fit into memory, and what is tried next when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One inner step, computed in micro-batches of whole sequences whose gradients are added up."""

    micro_sequences: int
    """Most sequences of a micro-batch, of each rank if there are several."""
    checkpoint: bool = False
    """Layers keep their inputs alone and are computed again in the backward pass."""

    def __str__(self) -> str:
        plural = "s" if self.micro_sequences > 1 else ""
        again = ", layers computed again in the backward pass" if self.checkpoint else ""
        return f"micro-batches of {self.micro_sequences} sequence{plural}{again}"


def whole_batch(training: TrainingConfig, num_ranks: int = 1) -> StepPlan:
    """The fastest plan: each rank's sequences at once, nothing computed again."""
    return StepPlan(micro_sequences=-(-training.batch_sequences // num_ranks))


def smaller(plan: StepPlan) -> StepPlan | None:
    """What to try after `plan` ran out of memory: half the micro-batch, down to one sequence, then checkpointing.

    Halving comes first because it costs the experts' products some of their size and nothing else, while
    checkpointing computes every layer twice. None: nothing is left to try.
    """
    if plan.micro_sequences > 1:
        return replace(plan, micro_sequences=plan.micro_sequences // 2)
    return None if plan.checkpoint else replace(plan, checkpoint=True)
