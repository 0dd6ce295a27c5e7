import numpy as np
import pytest

from spes_p2p.errors import SchemaError
from spes_p2p.testing.training import tiny_run
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.own_work import OwnWork, PendingUpdate, carried_master

CONFIG = tiny_run()
SIZE = psi_layout(CONFIG).num_values


def update(left_over: float, wanted: float = 9.0) -> PendingUpdate:
    full = np.full(SIZE, left_over, np.float32)
    remainders = {0: {"layers.0.experts.0.gate": np.full((12, 16), left_over, np.float32)}}
    return PendingUpdate(wanted=np.full(SIZE, wanted, np.float32), left_over=full, remainders=remainders)


def work(*rounds: int) -> OwnWork:
    """Whose update of round r left over r."""
    own = OwnWork(CONFIG)
    for number in rounds:
        own.published(number, update(float(number)))
    return own


def test_a_new_peer_has_no_residual():
    assert not OwnWork(CONFIG).residual.any()


def test_an_accepted_update_makes_its_residual_current():
    own = work(4, 5)
    own.settle("advance", 5)
    assert (own.residual == 5).all()
    assert own.pending == {}


def test_a_late_update_makes_its_own_residual_current_and_leaves_newer_ones_open():
    own = work(4, 5)
    own.settle("advance", 4)
    assert (own.residual == 4).all()
    assert list(own.pending) == [5]


def test_a_refused_update_leaves_the_residual_before_it():
    own = work(4)
    own.settle("advance", 4)
    own.published(5, update(5.0))
    own.settle("keep", None)
    assert (own.residual == 4).all()


def test_a_lost_branch_clears_residual_and_updates():
    own = work(4, 5)
    own.settle("advance", 4)
    own.settle("zero", None)
    assert not own.residual.any()
    assert own.pending == {}


def test_a_kept_part_leaves_the_whole_delta_over():
    own = work(4)
    own.settle("advance", 4, kept_parts=(1,))
    where = psi_layout(CONFIG).part_slice(1)
    assert (own.residual[where] == 9).all()
    assert (np.delete(own.residual, np.r_[where]) == 4).all()


def test_an_update_that_is_unknown_here_leaves_nothing_over():
    own = work(4)
    own.settle("advance", 4)
    own.settle("advance", 7)
    assert not own.residual.any()


def test_updates_whose_fate_is_decided_are_forgotten():
    assert sorted(work(1, 2, 3, 4, 5).pending) == [3, 4, 5]


def test_remainders_are_found_by_round_and_shard():
    own = work(4, 5)
    assert own.remainder(5, 0)["layers.0.experts.0.gate"][0, 0] == 5
    assert own.remainder(5, 1) is None
    assert own.remainder(3, 0) is None
    assert own.remainder(None, 0) is None


def test_the_master_is_the_start_and_what_rounding_took():
    start, rest = np.array([1.0, 2.0], np.float32), np.array([0.25, -0.5], np.float32)
    assert carried_master({"a": start}, {"a": rest})["a"].tolist() == [1.25, 1.5]
    assert start.tolist() == [1.0, 2.0]


def test_remainders_of_another_form_are_refused():
    with pytest.raises(SchemaError):
        carried_master({"a": np.zeros(2, np.float32)}, {"b": np.zeros(2, np.float32)})
    with pytest.raises(SchemaError):
        OwnWork(CONFIG).published(
            1, PendingUpdate(wanted=np.zeros(3, np.float32), left_over=np.zeros(3, np.float32), remainders={})
        )
