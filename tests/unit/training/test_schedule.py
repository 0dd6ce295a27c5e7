import pytest

from spes_p2p.config import TrainingConfig
from spes_p2p.training.schedule import learning_rate

CONFIG = TrainingConfig(peak_lr=1.0, min_lr_ratio=0.1, warmup_steps=10, total_steps=110)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.1), (5, 0.55), (10, 1.0), (35, 0.1 + 0.9 * 0.8535533905932737), (60, 0.55), (110, 0.1), (5000, 0.1)],
)
def test_warm_up_is_linear_and_decay_is_a_cosine(step, rate):
    assert learning_rate(CONFIG, step) == pytest.approx(rate, rel=1e-12)


def test_without_warm_up_it_begins_at_the_peak():
    assert learning_rate(CONFIG.model_copy(update={"warmup_steps": 0}), 0) == 1.0


def test_a_run_that_is_all_warm_up_ends_low():
    config = CONFIG.model_copy(update={"warmup_steps": 10, "total_steps": 10})
    assert [learning_rate(config, step) for step in (9, 10)] == pytest.approx([0.91, 0.1])


def test_negative_steps_are_refused():
    with pytest.raises(ValueError, match="negative"):
        learning_rate(CONFIG, -1)
