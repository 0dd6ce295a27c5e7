"""A peer may keep the experts of others in any format; its own masters and what it publishes stay fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_p2p.digests import digest
from spes_p2p.model.frozen import frozen_matrix
from spes_p2p.testing.training import genesis_round, genesis_shards, tiny_documents, tiny_run
from spes_p2p.training.data import TokenStream
from spes_p2p.training.state import restore_state, save_state
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import Trainer

CONFIG = tiny_run()
FORMATS = ["fp32", "bf16", "int8", "int4"]


def fresh(frozen_format) -> Trainer:
    stream = TokenStream(tiny_documents(), ByteTokenizer(), digest("tiny", 0))
    return Trainer(CONFIG, stream, frozen_format=frozen_format)


def started(frozen_format, owned=(1,)) -> Trainer:
    trainer = fresh(frozen_format)
    trainer.load_start(genesis_round(CONFIG, owned))
    return trainer


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def rounded(frozen_format, values) -> np.ndarray:
    matrix = frozen_matrix(frozen_format, values.shape)
    matrix.store_(torch.from_numpy(values))
    return matrix.decoded().numpy()


@pytest.mark.parametrize("frozen_format", FORMATS)
def test_others_experts_are_the_agreed_values_in_the_format_and_own_ones_exact(frozen_format):
    held = started(frozen_format).model.tensors()
    for shard, tensors in genesis_shards(CONFIG):
        for name, values in tensors.items():
            expected = values if shard == 1 else rounded(frozen_format, values)
            assert np.array_equal(held[name].detach().numpy(), expected)


@pytest.mark.parametrize("frozen_format", FORMATS)
def test_training_lowers_the_loss_and_moves_no_frozen_expert(frozen_format):
    trainer = started(frozen_format)
    frozen = {name: tensor for name, tensor in trainer.model.tensors().items() if ".experts.0." in name}
    before = trainer.evaluate(tiny_documents()).nats_per_byte
    assert trainer.train(20).finite
    assert trainer.evaluate(tiny_documents()).nats_per_byte < before - 1.5
    assert all(torch.equal(trainer.model.tensors()[name], tensor) for name, tensor in frozen.items())


def test_the_formats_train_alike():
    losses = {frozen_format: started(frozen_format).train(10).mean_loss for frozen_format in FORMATS}
    assert all(abs(loss - losses["fp32"]) < 0.02 for loss in losses.values())


@pytest.mark.parametrize("frozen_format", ["int8", "int4"])
def test_a_shard_that_comes_into_ownership_begins_at_the_agreed_fp32_values(frozen_format):
    trainer = started(frozen_format)
    trainer.train(2)
    trainer.load_start(replace(genesis_round(CONFIG, (2,)), round=2))
    assert same(trainer.trained(2), dict(genesis_shards(CONFIG))[2])


@pytest.mark.parametrize("frozen_format", ["int8", "int4"])
def test_a_trainer_goes_on_from_its_checkpoint_with_the_same_bits(frozen_format):
    trainer = started(frozen_format)
    trainer.train(2)
    saved = save_state(trainer)
    other = Trainer(
        CONFIG, TokenStream(tiny_documents(), ByteTokenizer(), digest("tiny", 0)), frozen_format=frozen_format
    )
    restore_state(other, saved)
    other.load_start(genesis_round(CONFIG, (1,)))
    trainer.load_start(genesis_round(CONFIG, (1,)))
    trainer.train(2)
    other.train(2)
    assert same(trainer.trained(1), other.trained(1))
    assert same(trainer.delta_psi(), other.delta_psi())
