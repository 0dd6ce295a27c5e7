import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_p2p.model.shards import num_psi_values, num_shard_values, parse_expert_name
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import (
    TINY_MODEL,
    genesis_round,
    genesis_shards,
    tiny_documents,
    tiny_run,
    tiny_trainer,
)
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.codecs import decode_expert_blob, psi_piece_values
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.layout import flatten, psi_layout
from spes_p2p.training.publish import publish
from spes_p2p.training.schedule import learning_rate
from spes_p2p.training.start import StartReader
from spes_p2p.training.trainer import RoundStart, Trainer

CONFIG = tiny_run()


def started(owned=(0,), config=CONFIG) -> Trainer:
    trainer = tiny_trainer(config)
    trainer.load_start(genesis_round(config, owned))
    return trainer


def base(name: str) -> np.ndarray:
    shard = parse_expert_name(name)[1]
    return dict(genesis_shards(CONFIG))[shard][name]


def next_round(trainer: Trainer, **changes) -> RoundStart:
    start = genesis_round(CONFIG, trainer.owned)
    return replace(start, round=trainer.round + 1, global_step=3, **changes)


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("owned", [(0,), (1, 3), (0, 1, 2, 3)])
def test_gradients_and_moments_are_held_for_psi_and_own_experts_alone(owned):
    trainer = started(owned)
    largest = 0
    step = trainer.optimizer.step

    def counting(rate: float) -> float | None:
        nonlocal largest
        gradients = [tensor.grad for tensor in trainer.model.tensors().values() if tensor.grad is not None]
        largest = max(largest, sum(gradient.nbytes for gradient in gradients))
        return step(rate)

    trainer.optimizer.step = counting
    trainer.train(6)
    trained_bytes = 4 * (num_psi_values(TINY_MODEL) + len(owned) * num_shard_values(TINY_MODEL, 1))
    moments = trainer.optimizer.state_tensors()
    assert largest <= trained_bytes
    assert sum(tensor.nbytes for tensor in moments) == 2 * trained_bytes
    # an expert without tokens in a step has no gradient then; all others make the bound exact
    assert largest > trained_bytes - 4 * num_shard_values(TINY_MODEL, 1)


def test_frozen_experts_do_not_move_and_owned_ones_do():
    trainer = started((1,))
    trainer.train(3)
    for shard, tensors in genesis_shards(CONFIG):
        held = {name: trainer.model.tensors()[name].detach().numpy() for name in tensors}
        assert same(held, tensors) == (shard != 1)


def test_delta_is_trained_minus_start_and_leads_back_to_the_trained_weights():
    trainer = started()
    start = genesis_round(CONFIG).psi
    assert not any(delta.any() for delta in trainer.delta_psi().values())
    trainer.train(2)
    delta = trainer.delta_psi()
    assert delta.keys() == start.keys()
    for name, weight in trainer.model.psi().items():
        np.testing.assert_array_equal(delta[name], weight.detach().numpy() - start[name])


def test_training_is_a_function_of_start_and_data():
    first, second = started(), started()
    first.train(3)
    second.train(2)
    second.train(1)
    assert same(first.delta_psi(), second.delta_psi())
    assert same(first.trained(0), second.trained(0))


def test_learning_rate_goes_by_global_and_local_step():
    trainer, rates = tiny_trainer(), []
    trainer.load_start(replace(genesis_round(CONFIG), global_step=2))
    trainer.train(2, on_step=lambda report: rates.append((report.global_step, report.local_step, report.learning_rate)))
    assert rates == [(2, 1, learning_rate(CONFIG.training, 2)), (3, 2, learning_rate(CONFIG.training, 3))]


def test_training_stops_when_asked_before_the_next_step():
    trainer = started()
    answers = iter([False, False, True])
    result = trainer.train(10, should_stop=lambda: next(answers))
    assert (result.num_steps, result.tokens) == (2, 2 * CONFIG.training.batch_tokens)


def test_training_without_a_start_is_refused():
    with pytest.raises(ValueError, match="no start"):
        tiny_trainer().train(1)


def test_a_start_without_all_shards_is_refused():
    start = replace(genesis_round(CONFIG), shards=list(genesis_shards(CONFIG))[:3])
    with pytest.raises(ValueError, match="lacks shard 3"):
        tiny_trainer().load_start(start)


def test_loss_falls():
    trainer = started((0, 1, 2, 3))
    before = trainer.evaluate(tiny_documents()).nats_per_byte
    assert trainer.train(30).finite
    assert trainer.evaluate(tiny_documents()).nats_per_byte < before - 2


# ------------------------------------------------------------------------------------------------ between the rounds


def published(owned=(0,)) -> tuple[Trainer, Tensors]:
    """A trainer that has published round 1, and the values of its first shard as it published them."""
    trainer, store = started(owned), MemoryBlobs()
    trainer.train(3)
    piece = publish(trainer, store, base).experts[0]
    return trainer, decode_expert_blob(CONFIG, piece.index, store.read(piece.blob))


def test_moments_are_kept_across_rounds():
    trainer, _ = published()
    before = trainer.optimizer.moments()
    trainer.load_start(next_round(trainer))
    after = trainer.optimizer.moments()
    assert {name: moments.num_steps for name, moments in after.items()} == dict.fromkeys(before, 3)
    assert all(np.array_equal(before[name].mean, after[name].mean) for name in before)


def test_moments_of_a_lost_shard_are_freed_and_of_a_gained_one_begin_at_zero():
    trainer, _ = published((0, 1))
    trainer.load_start(replace(next_round(trainer), owned=(1, 2)))
    held = {parse_expert_name(name)[1] for name in trainer.optimizer.moments() if parse_expert_name(name)}
    assert held == {1}
    trainer.train(1)
    assert trainer.optimizer.moments()["layers.0.experts.1.up"].num_steps == 4
    assert trainer.optimizer.moments()["layers.0.experts.2.up"].num_steps == 1


def test_master_rule_start_takes_the_agreed_value():
    trainer, _ = published()
    trainer.load_start(next_round(trainer, masters={0: "start"}))
    assert same(trainer.trained(0), dict(genesis_shards(CONFIG))[0])


def test_master_rule_carry_adds_what_rounding_took():
    trainer, public = published()
    trained = trainer.trained(0)
    trainer.load_start(next_round(trainer, masters={0: "carry"}, accepted_update=1, residual="advance"))
    start = dict(genesis_shards(CONFIG))[0]
    expected = {name: start[name] + (trained[name] - public[name]) for name in start}
    assert same(trainer.trained(0), expected)
    assert not same(expected, start)


def test_carry_on_a_start_equal_to_the_published_value_gives_the_trained_value():
    trainer, public = published()
    trained = trainer.trained(0)
    shards = dict(genesis_shards(CONFIG)) | {0: public}
    trainer.load_start(next_round(trainer, shards=shards.items(), masters={0: "carry"}, accepted_update=1))
    for name, values in trainer.trained(0).items():
        np.testing.assert_allclose(values, trained[name], rtol=0, atol=1e-8)


def test_master_rule_keep_leaves_the_trained_value():
    trainer, _ = published()
    trained = trainer.trained(0)
    trainer.load_start(next_round(trainer, masters={0: "keep"}))
    assert same(trainer.trained(0), trained)


@pytest.mark.parametrize("rule", ["carry", "keep"])
def test_a_shard_that_was_not_owned_begins_at_its_start_whatever_the_rule(rule):
    trainer, _ = published()
    trainer.load_start(replace(next_round(trainer, masters={2: rule}, accepted_update=1), owned=(2,)))
    assert same(trainer.trained(2), dict(genesis_shards(CONFIG))[2])


def test_what_the_psi_codec_left_over_is_in_the_next_update():
    trainer, _ = published()
    left_over = trainer.work.pending[1].left_over
    trainer.load_start(next_round(trainer, residual="advance", accepted_update=1))
    store = MemoryBlobs()
    trainer.train(1)
    delta = flatten(psi_layout(CONFIG), trainer.delta_psi())
    update = publish(trainer, store, base)
    decoded = np.concatenate([psi_piece_values(CONFIG, piece.index, store.read(piece.blob)) for piece in update.psi])
    np.testing.assert_allclose(decoded + trainer.work.pending[2].left_over, delta + left_over, rtol=0, atol=1e-7)
    assert np.abs(left_over).max() > 0


def test_loading_the_same_round_again_applies_no_rule_twice():
    trainer, _ = published()
    start = next_round(trainer, masters={0: "carry"}, residual="advance", accepted_update=1)
    trainer.load_start(start)
    masters, residual = trainer.trained(0), trainer.work.residual.copy()
    trainer.load_start(replace(start, shards=genesis_shards(CONFIG)))
    assert same(trainer.trained(0), masters)
    assert np.array_equal(trainer.work.residual, residual)


def test_the_same_round_on_another_branch_applies_its_own_rules():
    trainer, _ = published()
    trainer.load_start(
        replace(next_round(trainer, masters={0: "keep"}, residual="advance", accepted_update=1), base=b"A")
    )
    assert np.abs(trainer.work.residual).max() > 0
    trainer.load_start(replace(next_round(trainer, residual="zero"), round=2, base=b"B"))
    assert np.abs(trainer.work.residual).max() == 0
    assert trainer.work.pending == {}
    assert same(trainer.trained(0), dict(genesis_shards(CONFIG))[0])
    assert trainer.base == b"B"


def test_publishing_stores_every_piece_with_its_norm():
    trainer, store = started((0, 2)), MemoryBlobs()
    trainer.train(1)
    update = publish(trainer, store, base)
    assert [piece.index for piece in update.psi] == list(range(psi_layout(CONFIG).num_parts))
    assert [piece.index for piece in update.experts] == [0, 2]
    for piece in update.psi + update.experts:
        assert store.size_bytes(piece.blob) == piece.size_bytes
    decoded = psi_piece_values(CONFIG, 0, store.read(update.psi[0].blob))
    assert update.psi[0].squared_norm == pytest.approx(float((decoded**2).sum()), rel=1e-12)


def test_a_round_from_the_blob_store_equals_one_from_memory():
    config = tiny_run(codecs={"expert": "fp32", "psi": "fp32"})
    store = MemoryBlobs()
    reader = StartReader(config, store, genesis_start(make_genesis(config, store)))
    trainer = tiny_trainer(config)
    trainer.load_start(RoundStart(round=1, global_step=0, psi=reader.psi(), shards=reader.starts(), owned=(0,)))
    other = started(config=config)
    trainer.train(2)
    other.train(2)
    assert same(trainer.delta_psi(), other.delta_psi())


# ------------------------------------------------------------------------------------------- values that are not finite


def test_a_step_whose_loss_is_not_finite_is_skipped_and_counted():
    trainer = started()
    trainer.train(1)
    head = trainer.model.head.weight
    good = head.detach().clone()
    with torch.no_grad():
        head[0, 0] = math.nan
    before = {name: tensor.clone() for name, tensor in trainer.model.owned().items()}
    result = trainer.train(2)
    assert (result.num_steps, result.num_skipped, result.tokens) == (0, 2, 0)
    assert math.isnan(result.mean_loss)
    assert not result.finite
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.owned().items())
    with torch.no_grad():
        head.copy_(good)
    assert trainer.train(1).num_steps == 1


def test_the_start_after_weights_that_were_not_finite_uses_none_of_them():
    trainer, _ = published()
    with torch.no_grad():
        trainer.model.owned()["layers.0.experts.0.up"].fill_(math.inf)
    trainer.round = 2
    assert not trainer.train(1).finite
    trainer.load_start(next_round(trainer, masters={0: "keep"}))
    assert same(trainer.trained(0), dict(genesis_shards(CONFIG))[0])
    assert trainer.optimizer.moments() == {}
    assert trainer.train(1).finite


def test_decayed_balance_is_used_where_the_run_asks_for_it():
    training = CONFIG.training.model_copy(update={"decayed_balance": True, "balance_loss": 5.0})
    plain = training.model_copy(update={"decayed_balance": False})
    first, second = (started(config=tiny_run(training=t.model_dump())) for t in (training, plain))
    first.train(1)
    second.train(1)
    assert not same(first.delta_psi(), second.delta_psi())
