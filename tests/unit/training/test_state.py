from dataclasses import replace

import numpy as np
import pytest

from spes_p2p.errors import LocalStateError
from spes_p2p.model.shards import parse_expert_name
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import genesis_round, genesis_shards, tiny_run, tiny_trainer
from spes_p2p.training.publish import publish
from spes_p2p.training.state import restore_state, save_state
from spes_p2p.training.trainer import RoundStart, Trainer

CONFIG = tiny_run()


def base(name: str) -> np.ndarray:
    return dict(genesis_shards(CONFIG))[parse_expert_name(name)[1]][name]


def trained() -> Trainer:
    trainer = tiny_trainer()
    trainer.load_start(genesis_round(CONFIG, (0, 2)))
    trainer.train(3)
    publish(trainer, MemoryBlobs(), base)
    return trainer


def restored(data: bytes) -> Trainer:
    trainer = tiny_trainer()
    restore_state(trainer, data)
    return trainer


def second_round() -> RoundStart:
    start = replace(genesis_round(CONFIG, (0, 2)), round=2, global_step=3)
    return replace(start, masters={0: "carry", 2: "keep"}, residual="advance", accepted_update=1)


def test_a_restored_trainer_goes_on_with_the_same_bits():
    first = trained()
    second = restored(save_state(first))
    for trainer in (first, second):
        trainer.load_start(second_round())
        trainer.train(2)
    assert save_state(first) == save_state(second)


def test_a_trainer_restored_within_a_round_does_not_apply_the_rules_again():
    first = trained()
    first.load_start(second_round())
    second = restored(save_state(first))
    second.load_start(second_round())
    for trainer in (first, second):
        trainer.train(2)
    assert save_state(first) == save_state(second)


def test_saving_twice_gives_the_same_bytes():
    trainer = trained()
    assert save_state(trainer) == save_state(trainer)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_state_is_refused(size):
    with pytest.raises(LocalStateError, match="damaged"):
        restored(save_state(trained())[:size])


def test_a_state_of_another_run_is_refused():
    other = tiny_trainer(tiny_run(seed=1))
    with pytest.raises(LocalStateError, match="another run"):
        restore_state(other, save_state(trained()))


def test_a_safetensors_file_of_something_else_is_refused():
    import safetensors.numpy

    with pytest.raises(LocalStateError, match="damaged"):
        restored(safetensors.numpy.save({"a": np.zeros(3, np.float32)}))
