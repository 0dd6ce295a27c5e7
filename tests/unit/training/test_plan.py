import pytest

from spes_p2p.config import TrainingConfig
from spes_p2p.training.plan import StepPlan, smaller, whole_batch
from spes_p2p.training.ranks import parts as batch_parts


def attempts(plan: StepPlan) -> list[tuple[int, bool]]:
    found = []
    while plan is not None:
        found.append((plan.micro_sequences, plan.checkpoint))
        plan = smaller(plan)
    return found


def test_the_whole_batch_comes_first_and_unchecked():
    assert whole_batch(TrainingConfig(batch_sequences=6)) == StepPlan(micro_sequences=6, checkpoint=False)


def test_micro_batches_are_halved_to_one_sequence_and_then_layers_are_checkpointed():
    assert attempts(StepPlan(micro_sequences=8)) == [(8, False), (4, False), (2, False), (1, False), (1, True)]
    assert attempts(StepPlan(micro_sequences=7)) == [(7, False), (3, False), (1, False), (1, True)]


def test_a_plan_that_checkpoints_goes_on_checkpointing():
    assert attempts(StepPlan(micro_sequences=3, checkpoint=True)) == [(3, True), (1, True)]


@pytest.mark.parametrize(("micro", "sizes"), [(8, [8]), (9, [8]), (4, [4, 4]), (3, [3, 3, 2]), (1, [1] * 8)])
def test_micro_batches_hold_every_sequence_once_in_order(micro, sizes):
    parts = [part.rows for part in batch_parts(8, micro)]
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(8))
