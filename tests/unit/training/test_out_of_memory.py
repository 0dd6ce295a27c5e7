"""A step that does not fit into memory is made again in smaller pieces, of the same tokens."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from spes_p2p.errors import MachineError
from spes_p2p.testing.training import genesis_round, tiny_documents, tiny_run, tiny_trainer
from spes_p2p.training.out_of_memory import is_out_of_memory, says_out_of_memory
from spes_p2p.training.plan import StepPlan
from spes_p2p.training.trainer import StepReport, Trainer

BATCH = 4
CONFIG = tiny_run(training=tiny_run().training.model_copy(update={"batch_sequences": BATCH}).model_dump())


def started(plan: StepPlan | None = None) -> Trainer:
    trainer = tiny_trainer(CONFIG)
    trainer.plan = plan or trainer.plan
    trainer.load_start(genesis_round(CONFIG))
    return trainer


def cuda_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


def cpu_error() -> Exception:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")


class Small:
    """Makes a trainer's model as small as a machine on which more than `most` sequences do not fit, and none without
    checkpointing if `checkpointed_only`: the last layer raises, when the first has left its graph behind."""

    def __init__(
        self,
        trainer: Trainer,
        most: int,
        make_error: Callable[[], Exception] = cuda_error,
        checkpointed_only: bool = False,
    ) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.stray_gradients = 0
        model = trainer.model
        hidden, last = model.hidden, model.layers[-1]
        now = (0, False)

        def watched(tokens_BT, checkpoint_layers=False):
            nonlocal now
            now = (len(tokens_BT), checkpoint_layers)
            if now not in self.asked:
                self.asked.append(now)
                self.stray_gradients += sum(weight.grad is not None for weight in model.parameters())
            return hidden(tokens_BT, checkpoint_layers)

        def refuse(module, inputs):
            if now[0] > most or (checkpointed_only and not now[1]):
                raise make_error()

        model.hidden = watched
        last.register_forward_pre_hook(refuse)


def same_weights(first: Trainer, second: Trainer) -> bool:
    weights = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in weights)


@pytest.mark.parametrize("make_error", [cuda_error, cpu_error, MemoryError])
def test_the_micro_batch_is_halved_until_it_fits_and_the_choice_is_kept(make_error):
    trainer = started()
    small = Small(trainer, 1, make_error)
    reports: list[StepReport] = []
    assert trainer.train(2, on_step=reports.append).num_steps == 2
    assert small.asked == [(4, False), (2, False), (1, False)]
    assert small.stray_gradients == 0
    assert trainer.plan == StepPlan(micro_sequences=1)
    assert [report.local_step for report in reports] == [1, 2]


def test_the_step_is_repeated_with_the_same_tokens():
    trainer, expected = started(), started(StepPlan(micro_sequences=2))
    Small(trainer, 2)
    trainer.train(3)
    expected.train(3)
    assert same_weights(trainer, expected)
    assert trainer.stream.position == expected.stream.position


def test_memory_that_ran_out_late_in_the_batch_leaves_no_gradient_of_it_behind():
    """The second micro-batch fails once: what the first left is not counted twice."""
    trainer, expected = started(StepPlan(micro_sequences=2)), started(StepPlan(micro_sequences=1))
    hidden, calls = trainer.model.hidden, []

    def failing_once(tokens_BT, checkpoint_layers=False):
        calls.append(len(tokens_BT))
        if len(calls) == 2:
            raise cuda_error()
        return hidden(tokens_BT, checkpoint_layers)

    trainer.model.hidden = failing_once
    trainer.train(1)
    expected.train(1)
    assert calls == [2, 2, 1, 1, 1, 1]
    assert same_weights(trainer, expected)


def test_what_an_attempt_left_in_cycles_is_gone_before_the_next():
    """An abandoned graph is often part of one, and would stay until Python happens to look for it."""
    trainer, left, alive = started(), [], []

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    hidden = trainer.model.hidden

    def failing_once(tokens_BT, checkpoint_layers=False):
        alive.append(sum(cycle() is not None for cycle in left))
        if not left:
            left.append(weakref.ref(Cycle()))
            raise cuda_error()
        return hidden(tokens_BT, checkpoint_layers)

    trainer.model.hidden = failing_once
    gc.disable()
    try:
        trainer.train(1)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


def test_checkpointing_comes_last_and_the_user_is_told_of_every_change():
    trainer = started()
    small = Small(trainer, 1, checkpointed_only=True)
    trainer.train(1)
    assert small.asked == [(4, False), (2, False), (1, False), (1, True)]
    notices = trainer.take_notices()
    assert len(notices) == 3
    assert notices[0] == (
        "out of memory with micro-batches of 4 sequences; going on with micro-batches of 2 sequences "
        "(CUDA out of memory. Tried to allocate 2 GiB.)"
    )
    assert "going on with micro-batches of 1 sequence, layers computed again in the backward pass" in notices[2]
    assert trainer.take_notices() == ()


def test_one_checkpointed_sequence_that_does_not_fit_is_an_error_that_says_what_would_help():
    trainer = started()
    Small(trainer, 0)
    with pytest.raises(MachineError, match=r"one sequence of 16 tokens: CUDA out of memory.*\n.*--capacity"):
        trainer.train(1)
    assert all(weight.grad is None for weight in trainer.model.parameters())


def test_memory_that_runs_out_in_the_optimizer_is_no_reason_for_smaller_micro_batches():
    trainer = started()

    def step(rate: float) -> float:
        raise cuda_error()

    trainer.optimizer.step = step
    with pytest.raises(MachineError, match="the optimizer's state"):
        trainer.train(1)
    assert trainer.plan.micro_sequences == BATCH


def test_evaluation_shrinks_its_batches_too():
    trainer = started()
    expected = trainer.evaluate(tiny_documents()).nats_per_byte
    small = Small(trainer, 1)
    assert trainer.evaluate(tiny_documents()).nats_per_byte == pytest.approx(expected, rel=1e-6)
    assert [num for num, _ in small.asked] == [4, 2, 1]
    assert len(trainer.take_notices()) == 2


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("no"), OSError("disk full")])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)
    trainer = started()
    trainer.model.hidden = lambda *args: (_ for _ in ()).throw(error)
    with pytest.raises(type(error)):
        trainer.train(1)
    assert trainer.plan.micro_sequences == BATCH


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_gpu_that_is_full_is_recognised_outside_of_the_allocator_too(words):
    """Libraries, and kernels that need memory of their own, ask the driver past PyTorch's allocator."""
    assert is_out_of_memory(RuntimeError(words))


def test_numpy_out_of_memory_is_recognised():
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, dtype=np.uint8)
    assert is_out_of_memory(caught.value)


def test_the_allocator_for_the_cpu_says_what_is_expected_of_it():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    assert is_out_of_memory(caught.value)


# 24 MB over what the process holds with all its libraries, gradients and moments included: the activations of 16
# sequences need more.
UNDER_A_LIMIT = """
import resource, torch, torch._dynamo
from spes_p2p.config import ModelConfig, TrainingConfig
from spes_p2p.testing.training import genesis_round, tiny_run, tiny_trainer
from spes_p2p.training.out_of_memory import limit_memory
torch.set_num_threads(1)
config = tiny_run(
    model=ModelConfig(width=64, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, top_k=2, expert_width=64),
    training=TrainingConfig(sequence_length=256, batch_sequences=16),
)
trainer = tiny_trainer(config)
trainer.load_start(genesis_round(config))
with open("/proc/self/status") as status:
    held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
assert limit_memory(torch.device("cpu"), held + (24 << 20))
assert trainer.train(2).num_steps == 2
print(trainer.plan.micro_sequences, len(trainer.take_notices()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is meant on Linux alone")
def test_a_trainer_under_a_real_limit_finds_a_plan_that_fits():
    done = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    micro, num_notices = map(int, done.stdout.split())
    assert micro in (1, 2, 4, 8)
    assert 16 >> num_notices == micro


TO_THE_LAST_RESORT = """
import dataclasses, sys, torch
from spes_p2p.testing.training import genesis_round, tiny_run, tiny_trainer
from spes_p2p.training.out_of_memory import limit_memory
trainer = tiny_trainer(tiny_run())
trainer.load_start(genesis_round(tiny_run()))
trainer.train(2)
assert limit_memory(torch.device("cpu"), 1 << 40)
before = set(sys.modules)
trainer.plan = dataclasses.replace(trainer.plan, checkpoint=True)
trainer.train(2)
print(len({name.partition(".")[0] for name in set(sys.modules) - before if name.startswith("torch")}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is meant on Linux alone")
def test_under_a_limit_the_last_resort_loads_no_library():
    """A library that is loaded when memory has run out is loaded by half."""
    done = subprocess.run([sys.executable, "-c", TO_THE_LAST_RESORT], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.mark.parametrize(
    ("reason", "is_memory"),
    [
        ("the trainer's process of cuda:1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("the trainer's process of cpu: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        ("the trainer's process of cpu: MemoryError: ", True),
        ("the trainer's process of cuda:1: ended by SIGKILL", False),
        ("the trainer's process of cuda:1: KeyError: 'x'", False),
    ],
)
def test_a_rank_that_lacked_memory_is_known_by_its_last_words(reason, is_memory):
    assert says_out_of_memory(reason) == is_memory
