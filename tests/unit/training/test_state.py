from dataclasses import replace

import numpy as np
import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import LocalStateError
from spes_p2p.model.shards import parse_expert_name
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import (
    TINY_MODEL,
    genesis_round,
    genesis_shards,
    tiny_documents,
    tiny_run,
    tiny_trainer,
)
from spes_p2p.training.data import TokenStream
from spes_p2p.training.publish import publish
from spes_p2p.training.state import rest_on, restore_state, save_state, stream_state
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import RoundStart, Trainer

CONFIG = tiny_run()
WIDE = tiny_run(model=TINY_MODEL.model_copy(update={"width": 64, "expert_width": 72}))
"""Its experts' weights are large enough for 8-bit moments."""


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


def test_a_stream_of_a_state_has_the_size_it_says():
    stream = stream_state(trained())
    assert stream.size_bytes == sum(len(piece) for piece in stream.pieces())


def test_a_trainer_that_rests_on_its_state_goes_on_with_the_same_bits_and_holds_no_work_of_its_own():
    first, second = trained(), trained()
    data = save_state(second)
    rest_on(second, data)
    update = second.work.pending[1]
    arrays = (second.work.residual, update.wanted, update.left_over, *update.remainders[2].values())
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    for trainer in (first, second):
        trainer.load_start(second_round())
        trainer.train(2)
    assert save_state(first) == save_state(second)


def wide_trainer(moments) -> Trainer:
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("tiny", 0))
    return Trainer(WIDE, stream, moments=moments)


def wide_trained(moments) -> Trainer:
    trainer = wide_trainer(moments)
    trainer.load_start(genesis_round(WIDE, (0, 2)))
    trainer.train(3)
    return trainer


def test_a_state_with_int8_moments_comes_back_with_the_same_bits_and_is_smaller():
    first, second = wide_trained("int8"), wide_trainer("int8")
    data = save_state(first)
    restore_state(second, data)
    assert save_state(second) == data
    for trainer in (first, second):
        trainer.load_start(genesis_round(WIDE, (0, 2)))
        trainer.train(2)
    assert save_state(first) == save_state(second)
    assert len(data) < 0.75 * len(save_state(wide_trained("fp32")))


@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "fp32")])
def test_a_state_is_read_by_a_trainer_of_the_other_format(before, after):
    first, second = wide_trained(before), wide_trainer(after)
    restore_state(second, save_state(first))
    wanted, got = first.optimizer.moments(), second.optimizer.moments()
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert got[name].num_steps == values.num_steps
        np.testing.assert_allclose(got[name].mean, values.mean, rtol=0, atol=0.02 * np.abs(values.mean).max())
        np.testing.assert_allclose(got[name].square, values.square, rtol=0, atol=0.01 * values.square.max())


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
