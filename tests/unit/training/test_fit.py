"""What a node offers for the memory it has, and what it is told when that is too little."""

from pathlib import Path

import pytest

from spes_p2p.config import ModelConfig, NodeConfig, RunConfig, TrainingConfig
from spes_p2p.errors import MachineError
from spes_p2p.training.fit import Room, fit, largest_plan, plans, told
from spes_p2p.training.memory import memory_need
from spes_p2p.training.plan import StepPlan
from spes_p2p.units import bytes_text

RUN = RunConfig(
    model=ModelConfig(
        vocab_size=4096, width=256, num_layers=4, num_heads=4, num_kv_heads=4, num_experts=8, top_k=2, expert_width=512
    ),
    training=TrainingConfig(sequence_length=512, batch_sequences=4),
)
WHOLE, SMALLEST = StepPlan(micro_sequences=4), StepPlan(micro_sequences=1, checkpoint=True)


def node(**changes: object) -> NodeConfig:
    return NodeConfig.model_validate({"data_dir": Path(), **changes})


def room_for(num_owned: int, plan: StepPlan, **changes: object) -> Room:
    """Exactly enough."""
    need = memory_need(RUN, node(**changes), num_owned, plan)
    return Room(device_bytes=need.device.peak_bytes, of="of what is free")


def test_plans_go_from_the_whole_batch_to_one_checkpointed_sequence():
    assert [(plan.micro_sequences, plan.checkpoint) for plan in plans(RUN)] == [
        (4, False),
        (2, False),
        (1, False),
        (1, True),
    ]


def test_a_node_with_much_room_offers_all_shards_and_trains_whole_batches():
    need = fit(RUN, node(), Room(device_bytes=10**12))
    assert (need.num_owned, need.plan) == (8, WHOLE)


def test_as_many_shards_are_offered_as_fit_with_the_smallest_plan():
    need = fit(RUN, node(), room_for(3, SMALLEST))
    assert (need.num_owned, need.plan) == (3, SMALLEST)


def test_steps_are_cut_as_little_as_the_shards_allow_that_were_given():
    room = room_for(3, WHOLE)
    for num_owned, plan in ((1, WHOLE), (3, WHOLE)):
        need = largest_plan(RUN, node(), num_owned, room)
        assert need is not None
        assert need.plan == plan
    assert largest_plan(RUN, node(), 8, room_for(3, SMALLEST)) is None


def test_a_stated_capacity_is_kept_or_refused_with_the_number_that_fits():
    assert fit(RUN, node(capacity=2), Room(device_bytes=10**12)).num_owned == 2
    with pytest.raises(MachineError, match=r"for 4 shards of this run(.|\n)*--capacity 3 fits"):
        fit(RUN, node(capacity=4), room_for(3, SMALLEST))


def test_a_capacity_beyond_the_run_means_all_of_it():
    assert fit(RUN, node(capacity=99), Room(device_bytes=10**12)).num_owned == 8


def test_the_refusal_names_the_setting_that_would_fit():
    with pytest.raises(MachineError, match=r"1 shard of this run: even in micro(.|\n)*--frozen-format int8"):
        fit(RUN, node(), room_for(1, SMALLEST, frozen_format="int8"))
    with pytest.raises(MachineError, match=r"fits with --frozen-format int4 --moments int8\."):
        fit(RUN, node(), room_for(1, SMALLEST, frozen_format="int4", moments="int8"))


def test_a_machine_that_is_too_small_is_told_the_least_that_the_run_takes():
    least = memory_need(RUN, node(frozen_format="int4", moments="int8"), 1, SMALLEST).device.peak_bytes
    wanted = rf"The least that this run takes is {bytes_text(least)}, (.|\n)*more memory"
    with pytest.raises(MachineError, match=wanted):
        fit(RUN, node(), Room(device_bytes=10**6, of="of the 1.0 MB that are free"))


def test_a_gpu_needs_main_memory_beside_it():
    gpu = node(device="cuda:0")
    need = memory_need(RUN, gpu, 1, SMALLEST)
    assert need.host is not None
    with pytest.raises(MachineError, match=r"MB of main memory, of which 1\.0 MB is free"):
        fit(RUN, gpu.model_copy(update={"capacity": 1}), Room(device_bytes=10**12, host_bytes=10**6))
    enough = Room(device_bytes=10**12, host_bytes=need.host.peak_bytes)
    assert fit(RUN, gpu, enough).num_owned == 1


def test_one_line_tells_what_was_chosen_and_what_it_needs():
    room = room_for(3, SMALLEST)
    need = fit(RUN, node(), room)
    assert told(RUN, need, room) == (
        "memory: room for 3 of 8 shards in micro-batches of 1 sequence, layers computed again in the backward pass; "
        f"that needs {bytes_text(need.device.peak_bytes)} of what is free"
    )


def test_several_devices_begin_with_the_sequences_of_one():
    need = fit(RUN, node(more_devices=("cpu",)), Room(device_bytes=10**12))
    assert need.plan == StepPlan(micro_sequences=2)
    assert next(iter(plans(RUN, 3))) == StepPlan(micro_sequences=2)


def test_what_failed_when_it_was_tried_is_not_chosen_again():
    room = Room(device_bytes=10**12)
    for failed, wanted in ((WHOLE, 2), (StepPlan(micro_sequences=3), 2), (StepPlan(micro_sequences=2), 1)):
        need = largest_plan(RUN, node(), 1, room, failed)
        assert need is not None
        assert need.plan == StepPlan(micro_sequences=wanted)
    need = largest_plan(RUN, node(), 1, room, StepPlan(micro_sequences=1))
    assert need is not None
    assert need.plan == SMALLEST
    assert largest_plan(RUN, node(), 1, room, SMALLEST) is None
