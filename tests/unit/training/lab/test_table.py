import pytest

from spes_p2p.training.lab.experiment import Experiment, Outcome, Point
from spes_p2p.training.lab.table import difference, rows_of


def outcome(method: str, seed: int, loss: float, text: str = "iid") -> Outcome:
    experiment = Experiment(method=method, seed=seed, text=text)
    points = (Point(step=1, tokens=9, nats_per_byte=9.0), Point(step=2, tokens=18, nats_per_byte=loss))
    return Outcome(experiment=experiment, curve=points, cpu_seconds=1.0 + seed, wall_seconds=2.0)


def table(*groups: tuple[str, tuple[float, ...]]):
    return rows_of(outcome(method, seed, loss) for method, losses in groups for seed, loss in enumerate(losses))


def test_a_row_has_the_mean_and_the_spread_of_its_seeds():
    (row,) = table(("spes", (2.0, 2.3, 2.1)))
    assert row.mean == pytest.approx(2.1333, abs=1e-4)
    assert row.spread == pytest.approx(0.3)
    assert row.cpu_seconds == 3.0


@pytest.mark.parametrize(("ours", "verdict"), [(2.21, "worse"), (2.19, "no difference shown"), (1.79, "better")])
def test_only_a_difference_beyond_twice_the_spread_is_claimed(ours, verdict):
    rows = table(("centralised", (1.95, 2.05)), ("spes", (ours, ours)))
    found = difference(rows, "iid", "spes", "centralised")
    assert found.verdict == verdict
    assert found.relative == pytest.approx(ours / 2 - 1)


def test_a_method_with_one_seed_borrows_the_largest_spread_of_its_text():
    rows = rows_of(
        [
            outcome("spes", 0, 2.0),
            outcome("spes", 1, 2.2),
            outcome("noloco", 0, 2.4),
            outcome("diloco", 0, 2.0, "kinds"),
            outcome("diloco", 1, 2.9, "kinds"),
        ]
    )
    assert {(row.text, row.method): row.spread for row in rows} == pytest.approx(
        {("iid", "spes"): 0.2, ("iid", "noloco"): 0.2, ("kinds", "diloco"): 0.9}
    )


def test_what_was_not_run_is_not_compared():
    assert difference(table(("spes", (2.0,))), "iid", "spes", "centralised") is None


def test_without_a_second_seed_of_anything_nothing_is_claimed():
    found = difference(table(("centralised", (2.0,)), ("spes", (9.0,))), "iid", "spes", "centralised")
    assert (found.is_claimed, found.verdict) == (False, "no difference shown")
