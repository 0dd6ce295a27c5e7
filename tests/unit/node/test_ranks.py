"""A peer's model over two ranks: the same numbers as on one device. Real processes on CPUs, with gloo."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from spes_p2p.testing.ranks import (
    SPREAD_MODEL,
    SPREAD_RUN,
    SPREAD_TRAINING,
    CpuTeam,
    largest_difference,
    trainer_on,
)
from spes_p2p.testing.training import genesis_round, genesis_shards, tiny_documents, tiny_run
from spes_p2p.training.engine import Engine
from spes_p2p.training.state import restore_state, save_state
from spes_p2p.training.trainer import StepReport

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = CpuTeam(tmp_path_factory.mktemp("ranks"), 2)
    yield team
    team.close()


def genesis_of(name: str) -> np.ndarray:
    return next(tensors[name] for _, tensors in genesis_shards(SPREAD_RUN) if name in tensors)


@pytest.mark.parametrize(
    ("frozen_format", "micro", "checkpoint"), [("fp32", 4, False), ("int8", 1, True), ("int4", 4, False)]
)
def test_ranks_train_what_one_device_trains(team: CpuTeam, frozen_format, micro, checkpoint):
    spread = trainer_on(team.engine(frozen_format=frozen_format), micro, checkpoint)
    alone = trainer_on(Engine(SPREAD_RUN, frozen_format=frozen_format), min(micro, team.micro_alone), checkpoint)
    reports: list[list[StepReport]] = [[], []]
    for trainer, seen in zip((spread, alone), reports, strict=True):
        trainer.load_start(genesis_round(SPREAD_RUN, (0, 3, 5)))
        trainer.train(4, on_step=seen.append)
    assert [report.loss for report in reports[0]] == pytest.approx([report.loss for report in reports[1]], rel=1e-6)
    norms = [[report.gradient_norm for report in seen] for seen in reports]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert largest_difference(spread, alone) < 1e-5
    assert spread.evaluate(tiny_documents()).nats_per_byte == pytest.approx(
        alone.evaluate(tiny_documents()).nats_per_byte, rel=1e-6
    )
    assert spread.finite


def test_what_was_evaluated_before_does_not_stay(team: CpuTeam):
    """Embedding, last norm and head stay gathered after a forward pass unless they are let go of."""
    spread, alone = trainer_on(team.engine()), trainer_on(Engine(SPREAD_RUN), team.micro_alone)
    results: list[list[float]] = [[], []]
    for trainer, nats in zip((spread, alone), results, strict=True):
        trainer.load_start(genesis_round(SPREAD_RUN, (0,)))
        nats.append(trainer.evaluate(tiny_documents()).nats_per_byte)
        trainer.engine.load({"head.weight": trainer.engine.host_weight("head.weight") * np.float32(8)})
        nats.append(trainer.evaluate(tiny_documents()).nats_per_byte)
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0][0] != pytest.approx(results[0][1], rel=1e-2)


def test_an_expert_with_tokens_on_one_rank_only_is_trained_by_all(team: CpuTeam):
    model = SPREAD_MODEL.model_copy(update={"num_experts": 32})
    config = tiny_run(model=model, training=SPREAD_TRAINING.model_copy(update={"sequence_length": 16}))
    spread, alone = trainer_on(team.engine(config)), trainer_on(Engine(config), team.micro_alone)
    for trainer in (spread, alone):
        trainer.load_start(genesis_round(config, tuple(range(0, 32, 2))))
    tokens = torch.from_numpy(alone.stream.next_batch(4, 16))
    busy = [
        {int(j) for routing in alone.model(rows[:, :-1])[1] for j in routing.experts_TK.flatten()}
        for rows in (tokens[:2], tokens[2:])
    ]
    assert any(j % 2 == 0 for j in busy[0] ^ busy[1]), "the case that is to be tried"
    alone.stream.position = spread.stream.position
    for trainer in (spread, alone):
        trainer.train(3)
    assert largest_difference(spread, alone) < 1e-5


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_checkpoint_of_ranks_is_one_of_one_device_and_back(team: CpuTeam, moments):
    config = tiny_run(
        model=SPREAD_MODEL.model_copy(update={"width": 256}), training=SPREAD_TRAINING
    )  # large enough for 8 bits
    first = trainer_on(team.engine(config, moments=moments))
    first.load_start(genesis_round(config, (0, 3)))
    first.train(2)
    data = save_state(first)
    alone = trainer_on(Engine(config))
    restore_state(alone, data)
    again = trainer_on(team.engine(config, moments=moments))
    restore_state(again, save_state(alone))
    assert save_state(again) == data
    for name, wanted in first.engine.moments(first.engine.weights()).items():
        got = alone.optimizer.moments([name])[name]
        np.testing.assert_array_equal(got.mean, wanted.mean)
        np.testing.assert_array_equal(got.square, wanted.square)
        assert got.num_steps == wanted.num_steps == 2


def test_moments_packed_by_one_device_are_taken_over_by_ranks(team: CpuTeam):
    config = tiny_run(model=SPREAD_MODEL.model_copy(update={"width": 256}), training=SPREAD_TRAINING)
    alone, spread = trainer_on(Engine(config, moments="int8")), trainer_on(team.engine(config))
    alone.load_start(genesis_round(config, (0, 3)))
    alone.train(2)
    restore_state(spread, save_state(alone))
    wanted, got = alone.optimizer.moments(), spread.engine.moments(alone.engine.weights())
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name].mean, wanted[name].mean) for name in wanted)
    assert all(np.array_equal(got[name].square, wanted[name].square) for name in wanted)


def test_shards_that_stay_keep_masters_and_moments_when_others_come_and_go(team: CpuTeam):
    spread, alone = trainer_on(team.engine()), trainer_on(Engine(SPREAD_RUN), team.micro_alone)
    for trainer in (spread, alone):
        trainer.load_start(genesis_round(SPREAD_RUN, (0, 3)))
        trainer.train(3)
        start = genesis_round(SPREAD_RUN, (3, 6))
        trainer.load_start(replace(start, round=2, global_step=3, masters={3: "keep"}))
    kept = "layers.1.experts.3.up"
    assert kept in spread.engine.moments(spread.engine.weights())
    assert "layers.1.experts.6.up" not in spread.engine.moments(spread.engine.weights())
    np.testing.assert_allclose(spread.trained(3)[kept], alone.trained(3)[kept], rtol=0, atol=1e-6)
    assert not np.array_equal(spread.trained(3)[kept], genesis_of(kept))
    for trainer in (spread, alone):
        trainer.train(2)
    assert largest_difference(spread, alone) < 1e-5


def test_a_rank_holds_its_rows_of_everything(team: CpuTeam):
    engine = team.engine(frozen_format="int8", moments="int8")
    engine.set_owned([1])
    whole = Engine(SPREAD_RUN, frozen_format="int8")
    whole.set_owned([1])
    own = sum(team.processes.ranks.local(tensor).nbytes for tensor in engine.model.parameters())
    assert not list(engine.model.buffers())
    all_of_it = sum(tensor.nbytes for tensor in chain(whole.model.parameters(), whole.model.buffers()))
    assert own == pytest.approx(all_of_it / team.count, rel=0.03)


def test_weights_that_are_not_finite_are_seen_whichever_rank_holds_them(team: CpuTeam):
    trainer = trainer_on(team.engine())
    trainer.load_start(genesis_round(SPREAD_RUN, (0,)))
    good = trainer.trained(0)
    for row in (0, -1):
        bad = {name: values.copy() for name, values in good.items()}
        bad["layers.0.experts.0.up"][row, 0] = np.nan
        trainer.engine.load(bad)
        assert not trainer.engine.weights_are_finite()
        result = trainer.train(2)
        assert (result.num_skipped, result.finite) == (2, False)
    trainer.engine.load(good)
    assert trainer.train(2).num_steps == 2
    assert trainer.finite


def test_what_does_not_fit_is_refused_before_any_rank_hears_of_it(team: CpuTeam):
    trainer = trainer_on(team.engine())
    with pytest.raises(ValueError, match=r"no tensor embed\.weight of shape"):
        trainer.engine.load({"embed.weight": np.zeros((3, 3), dtype=np.float32)})
    with pytest.raises(ValueError, match="no expert 8"):
        trainer.engine.set_owned([8])
    trainer.load_start(genesis_round(SPREAD_RUN, (0,)))
    assert trainer.train(1).num_steps == 1
