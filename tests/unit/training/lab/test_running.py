from typing import get_args

import pytest
from pydantic import ValidationError

from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import TINY_TRAINING, tiny_run
from spes_p2p.training.lab.curves import draw_curves
from spes_p2p.training.lab.experiment import Experiment, Method
from spes_p2p.training.lab.running import conduct


def tiny_experiment(**changes: object) -> Experiment:
    training = TINY_TRAINING.model_copy(update={"total_steps": 6, "warmup_steps": 2})
    model = tiny_run().model.model_copy(update={"vocab_size": 256})
    fields = {
        "method": "spes",
        "num_peers": 2,
        "text_bytes": 40_000,
        "evaluate_every": 3,
        "run": tiny_run(training=training, model=model, held_out_bytes=12_000),
    }
    return Experiment.model_validate(fields | changes)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_learns_from_equally_many_tokens(method):
    outcome = conduct(tiny_experiment(method=method), MemoryBlobs())
    tokens_per_step = 2 * TINY_TRAINING.batch_tokens
    assert [(point.step, point.tokens) for point in outcome.curve] == [
        (3, 3 * tokens_per_step),
        (6, 6 * tokens_per_step),
    ]
    assert outcome.last < outcome.curve[0].nats_per_byte < 5.6


def test_equal_experiments_give_equal_curves_and_another_seed_another():
    first, second = (conduct(tiny_experiment(), MemoryBlobs()) for _ in range(2))
    assert first.curve == second.curve
    assert conduct(tiny_experiment(seed=1), MemoryBlobs()).curve != first.curve


def test_the_last_round_is_as_short_as_the_schedule_leaves_it():
    training = TINY_TRAINING.model_copy(update={"total_steps": 4, "warmup_steps": 1})
    run = tiny_experiment().run.model_copy(update={"training": training})
    assert [point.step for point in conduct(tiny_experiment(run=run), MemoryBlobs()).curve] == [3, 4]


def test_an_experiment_survives_its_file():
    experiment = tiny_experiment(seed=3)
    again = Experiment.model_validate_json(experiment.model_dump_json())
    assert (again, again.key) == (experiment, experiment.key)
    assert tiny_experiment(seed=4).key != experiment.key


@pytest.mark.parametrize(
    ("changes", "reason"), [({"owners_per_shard": 3}, "3 owners"), ({"method": "noloco", "num_peers": 3}, "even")]
)
def test_impossible_experiments_are_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        tiny_experiment(**changes)


def test_curves_become_a_picture_of_each_text(tmp_path):
    pytest.importorskip("matplotlib")
    outcome = conduct(tiny_experiment(), MemoryBlobs())
    (picture,) = draw_curves([outcome], tmp_path)
    assert picture.name == "learning-iid.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
