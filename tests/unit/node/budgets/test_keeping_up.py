"""Which shards and inner steps a capped line keeps up with."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from spes_p2p.config import Limits
from spes_p2p.errors import MachineError
from spes_p2p.node.budgets.keeping_up import LINE_SHARE, MIN_STEPS, Demand, demand_of, keep_up
from spes_p2p.node.budgets.limits import parse_rate
from spes_p2p.protocol.head import Terms
from spes_p2p.testing.protocol_cases import genesis_of, identities

MB = 1_000_000
DEMAND = Demand(
    num_shards=8,
    shard_bytes=100 * MB,
    psi_bytes=20 * MB,
    result_bytes=80 * MB,
    num_others=3,
    expert_acks=1,
    replicas=2,
    transfer_s=100.0,
    round_max_s=600.0,
)
NEEDS_ONE = 100 * MB * 2 + 20 * MB * 2
"""One shard in two copies, psi in two."""


def upload(seconds: float, size: int = NEEDS_ONE) -> Limits:
    """The cap with which so many bytes leave in just this time."""
    return Limits(upload=round(size / LINE_SHARE / seconds))


def test_the_sum_of_a_round() -> None:
    assert DEMAND.publish_bytes(1) == NEEDS_ONE
    assert DEMAND.publish_bytes(3) == 3 * 200 * MB + 40 * MB
    assert DEMAND.load_bytes(2) == 6 * 100 * MB + 20 * MB * 2 * 3 // 4 + 80 * MB
    alone = replace(DEMAND, num_others=0, expert_acks=0)
    assert alone.publish_bytes(8) == 0


def test_no_limits_change_nothing() -> None:
    pace = keep_up(DEMAND, Limits(), 8, stated=False)
    assert (pace.capacity, pace.note, pace.steps(100, None)) == (8, "", 100)


def test_a_slower_line_offers_fewer_shards_with_all_steps() -> None:
    sizes = [keep_up(DEMAND, upload(99.0, DEMAND.publish_bytes(k)), 8, stated=False) for k in range(1, 9)]
    assert [pace.capacity for pace in sizes] == list(range(1, 9))
    assert [pace.steps(100, 1.0) for pace in sizes] == [100] * 8
    assert sizes[7].note == ""
    assert "3 of 8 shards are offered" in sizes[2].note


def test_below_one_shard_training_ends_earlier_by_what_publishing_takes_longer() -> None:
    pace = keep_up(DEMAND, upload(160.0), 8, stated=False)
    assert pace.capacity == 1
    assert pace.shortened_s == pytest.approx(60.0, rel=1e-3)
    assert pace.steps(100, None) == 90  # H fills a round of 600 s: 60 s are 10 steps of 6 s
    assert pace.steps(100, 2.0) == 70
    assert pace.steps(100, 0.5) == int(MIN_STEPS * 100)
    assert pace.steps(1, 5.0) == 1
    assert "ends 60 s earlier" in pace.note


def test_a_line_that_cannot_keep_up_is_told_the_numbers_and_what_would_do() -> None:
    with pytest.raises(MachineError) as caught:
        keep_up(DEMAND, upload(600.0), 8, stated=False)
    words = str(caught.value)
    assert caught.value.exit_code == 5
    assert "240 MB must leave within 550 s" in words
    found = re.findall(r"[\d.]+[kMG]B/s", words.partition("\n")[2])
    least, comfortable = (Limits(upload=parse_rate(rate)) for rate in found)
    assert keep_up(DEMAND, least, 8, stated=False).capacity == 1
    assert keep_up(DEMAND, comfortable, 8, stated=False).steps(100, 1.0) == 100


def test_a_stated_capacity_is_kept_or_refused() -> None:
    slow = upload(99.0)
    assert keep_up(DEMAND, slow, 8, stated=False).capacity == 1
    pace = keep_up(DEMAND, slow, 3, stated=True)
    assert pace.capacity == 3
    assert pace.shortened_s > 0
    with pytest.raises(MachineError, match="with 8 shards"):
        keep_up(DEMAND, upload(549.0), 8, stated=True)


def test_a_download_below_what_a_round_brings_is_refused() -> None:
    need = DEMAND.load_bytes(1) / LINE_SHARE / 700.0
    keep_up(DEMAND, Limits(download=round(need * 1.01)), 8, stated=False)
    with pytest.raises(MachineError, match=r"--download .* too slow.*\nAllow at least --download (\d+)kB/s") as caught:
        keep_up(DEMAND, Limits(download=round(need * 0.9)), 8, stated=False)
    rate = re.findall(r"\d+kB/s", str(caught.value))[-1]
    keep_up(DEMAND, Limits(download=parse_rate(rate)), 8, stated=False)


def test_the_demand_of_a_run_is_that_of_its_terms() -> None:
    terms = Terms(genesis_of(identities(4)))
    demand = demand_of(terms, is_member=True)
    assert demand.num_others == 3
    assert demand_of(terms, is_member=False).num_others == 4
    assert (demand.expert_acks, demand.replicas) == (terms.expert_acks, terms.replicas)
    assert demand.transfer_s * 1000 == terms.transfer_budget_ms
