"""A plan that ran out of memory and took the trainer process with it, noted for the next one.

One device makes such a step again at once, in smaller pieces. Several cannot: the others wait in an exchange that will
not happen, and all processes end. So the plan is written down before the end. The note holds for as long as the node
runs that started this trainer: after that there may be more memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from spes_p2p.storage.atomic import write_file
from spes_p2p.training.plan import StepPlan

FILE = "failed-plan.json"


class FailedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What did not fit."""

    num_owned: int
    """Shards that were owned then."""
    micro_sequences: int
    checkpoint: bool
    node_pid: int

    @property
    def plan(self) -> StepPlan:
        """As the trainer has it."""
        return StepPlan(micro_sequences=self.micro_sequences, checkpoint=self.checkpoint)


def note_failed_plan(folder: Path, num_owned: int, plan: StepPlan) -> None:
    """Write it down. Raises MachineError."""
    note = FailedPlan(
        num_owned=num_owned,
        micro_sequences=plan.micro_sequences,
        checkpoint=plan.checkpoint,
        node_pid=os.getppid(),
    )
    write_file(folder / FILE, msgspec.json.encode(note))


def read_failed_plan(folder: Path) -> FailedPlan | None:
    """What an earlier trainer of the same node has noted; None: nothing, or nothing that can be read."""
    try:
        note = msgspec.json.decode((folder / FILE).read_bytes(), type=FailedPlan)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.node_pid == os.getppid() else None
