"""A plan that took the trainer process with it is not tried again by the next one of the same node."""

import os
from pathlib import Path

import msgspec
import pytest

from spes_p2p.node.failed_plan import FILE, FailedPlan, note_failed_plan, read_failed_plan
from spes_p2p.training.plan import StepPlan

PLAN = StepPlan(micro_sequences=4, checkpoint=True)


def test_a_note_is_read_by_a_trainer_of_the_same_node(tmp_path: Path):
    note_failed_plan(tmp_path, 3, PLAN)
    note = read_failed_plan(tmp_path)
    assert note is not None
    assert (note.num_owned, note.plan) == (3, PLAN)


def test_a_note_of_another_node_process_no_longer_counts(tmp_path: Path):
    other = FailedPlan(num_owned=3, micro_sequences=4, checkpoint=True, node_pid=os.getppid() + 1)
    (tmp_path / FILE).write_bytes(msgspec.json.encode(other))
    assert read_failed_plan(tmp_path) is None


@pytest.mark.parametrize("data", [None, b"", b"{", b'{"num_owned": "x"}'])
def test_no_note_and_a_damaged_one_say_nothing(tmp_path: Path, data: bytes | None):
    if data is not None:
        (tmp_path / FILE).write_bytes(data)
    assert read_failed_plan(tmp_path) is None
