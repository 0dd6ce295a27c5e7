"""What the kill scenario counts."""

from __future__ import annotations

from spes_p2p.digests import digest
from spes_p2p.testing.kills import PEERS, Scale, contradictions, lost_finals, means, percentile, plan_kills

A, B = digest("a"), digest("b")


def test_certificate_that_is_gone_or_replaced_is_lost() -> None:
    before = {(0, 1): A, (0, 2): A, (0, 3): A}
    assert lost_finals(before, {(0, 1): A, (0, 2): B, (0, 4): A}) == {(0, 2), (0, 3)}


def test_two_hashes_of_one_round_contradict_each_other() -> None:
    assert contradictions({"ada": {(0, 1): A}, "ben": {(0, 1): A, (0, 2): B}}) == set()
    assert contradictions({"ada": {(0, 1): A, (0, 2): A}, "ben": {(0, 1): A, (0, 2): B}}) == {(0, 2)}


def test_percentile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.95, 1.0)] == [10.0, 19.0, 20.0]
    assert percentile([], 0.95) == 0.0


def test_means_are_of_successive_groups() -> None:
    assert means([4.0, 2.0, 3.0, 1.0], 2) == [3.0, 2.0]
    assert means([4.0], 2) == [4.0]


def test_kills_follow_from_the_seed() -> None:
    one = list(plan_kills(Scale(seed=5), PEERS))
    assert one == list(plan_kills(Scale(seed=5), PEERS))
    assert one != list(plan_kills(Scale(seed=6), PEERS))
    assert len(one) == 20
