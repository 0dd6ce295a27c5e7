"""Which shards and inner steps a line with limits, and a share of the time, keep up with."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from spes_p2p.config import Limits
from spes_p2p.node.budgets.keeping_up import LINE_SHARE, MIN_STEPS, Demand, Judgement, demand_of, keep_up
from spes_p2p.node.budgets.limits import parse_rate
from spes_p2p.node.outlook import crowd_with_one_more
from spes_p2p.node.traffic import Crowd, round_traffic
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.testing.protocol_cases import genesis_of, identities

MB = 1_000_000
DEMAND = Demand(
    sizes=PieceSizes(
        expert_blob_bytes=100 * MB, psi_piece_bytes=5 * MB, part_result_bytes=20 * MB, num_parts=4, num_shards=8
    ),
    crowd=Crowd(num_members=4, num_eligible=4, num_replicas=2),
    expert_acks=1,
    inner_steps=100,
    transfer_s=100.0,
    round_max_s=600.0,
)
NEEDS_ONE = 100 * MB * 2 + 20 * MB * 2
"""One shard in two copies, psi in two."""


def upload(seconds: float, size: int = NEEDS_ONE) -> Limits:
    """The cap with which so many bytes leave in just this time."""
    return Limits(upload=round(size / LINE_SHARE / seconds))


def judge(limits: Limits, step_s: float | None = None, demand: Demand = DEMAND) -> Judgement:
    return keep_up(demand, limits, 8, stated=False, step_s=step_s)


def test_the_sum_of_a_round() -> None:
    assert DEMAND.publish_bytes(1) == NEEDS_ONE
    assert DEMAND.publish_bytes(3) == 3 * 200 * MB + 40 * MB
    # others' experts; deltas of three others, of the three of four parts that it acknowledges; half of psi's results
    assert DEMAND.load_bytes(2) == 6 * 100 * MB + 3 * 20 * MB * 3 // 4 + 80 * MB // 2
    alone = replace(DEMAND, crowd=Crowd(num_members=1, num_eligible=1, num_replicas=1), expert_acks=0)
    assert (alone.publish_bytes(8), alone.load_bytes(8)) == (0, 0)


def test_no_limits_change_nothing() -> None:
    judged = judge(Limits(), 100.0)
    assert (judged.capacity, judged.inner_steps, judged.refusal, judged.note) == (8, 100, "", "")


def test_a_slower_line_offers_fewer_shards_with_all_steps() -> None:
    judged = [judge(upload(99.0, DEMAND.publish_bytes(k)), 1.0) for k in range(1, 9)]
    assert [one.capacity for one in judged] == list(range(1, 9))
    assert [one.inner_steps for one in judged] == [100] * 8
    assert judged[7].note == ""
    assert "3 of 8 shards are offered" in judged[2].note


def test_below_one_shard_training_ends_earlier_by_what_publishing_takes_longer() -> None:
    judged = judge(upload(160.0))
    assert (judged.capacity, judged.refusal) == (1, "")
    assert judged.shortened_s == pytest.approx(60.0, rel=1e-3)
    assert judged.inner_steps == 90  # H fills a round of 600 s: 60 s are 10 steps of 6 s
    assert judge(upload(160.0), 2.0).inner_steps == 70
    assert judge(upload(160.0), 0.5).inner_steps == int(MIN_STEPS * 100)
    assert judge(upload(160.0), 5.0, replace(DEMAND, inner_steps=1)).inner_steps == 1
    assert "ends 60 s earlier" in judged.note


def test_a_share_of_the_time_makes_fewer_steps_in_what_publishing_leaves() -> None:
    """Others as fast as this machine train for 200 s, of which 140 s remain: 70 steps, or 35 at half of the time."""
    half = upload(160.0).model_copy(update={"gpu_share": 0.5})
    assert judge(upload(160.0), 2.0).inner_steps == 70
    assert judge(half, 2.0).inner_steps == 35
    slow = judge(Limits(gpu_share=0.1), 2.0)
    assert slow.inner_steps == 100, "the round ends the training, not this"
    assert "--gpu-share 10%: not all 100 inner steps fit into the 600 s" in slow.note
    assert judge(Limits(gpu_share=0.5), 2.0).note == ""


def test_slow_rounds_leave_time_to_train_while_others_do() -> None:
    """Rounds of 500 s: the others train for 400 s at least, so that 100 steps of 2 s end early enough."""
    slow = replace(DEMAND, round_s=500.0)
    assert judge(upload(160.0), 2.0, slow).inner_steps == 100
    assert judge(upload(160.0), 2.0, replace(DEMAND, round_s=10.0)).inner_steps == 70, "as without having watched"


def test_a_line_that_cannot_keep_up_is_told_the_numbers_and_what_would_do() -> None:
    refusal = judge(upload(600.0)).refusal
    assert "240 MB must leave within 550 s" in refusal
    found = re.findall(r"[\d.]+[kMG]B/s", refusal.partition("\n")[2])
    least, comfortable = (Limits(upload=parse_rate(rate)) for rate in found)
    assert (judge(least).refusal, judge(least).capacity) == ("", 1)
    assert judge(comfortable, 1.0).inner_steps == 100


def test_a_stated_capacity_is_kept_or_refused() -> None:
    slow = upload(99.0)
    assert judge(slow).capacity == 1
    judged = keep_up(DEMAND, slow, 3, stated=True)
    assert (judged.capacity, judged.refusal) == (3, "")
    assert judged.shortened_s > 0
    assert "with 8 shards" in keep_up(DEMAND, upload(549.0), 8, stated=True).refusal


def test_a_download_below_what_a_round_brings_is_refused() -> None:
    need = DEMAND.load_bytes(1) / LINE_SHARE / 700.0
    assert judge(Limits(download=round(need * 1.01))).refusal == ""
    refusal = judge(Limits(download=round(need * 0.9))).refusal
    assert re.search(r"--download .* too slow.*\nAllow at least --download (\d+)kB/s", refusal)
    rate = re.findall(r"\d+kB/s", refusal)[-1]
    assert judge(Limits(download=parse_rate(rate))).refusal == ""


def test_a_download_slower_than_rounds_are_now_is_said_and_not_refused() -> None:
    limits = Limits(download=round(DEMAND.load_bytes(1) / LINE_SHARE / 300.0))
    judged = judge(limits, demand=replace(DEMAND, round_s=200.0))
    assert judged.refusal == "" and "longer than rounds take now" in judged.note
    assert judge(limits, demand=replace(DEMAND, round_s=400.0)).note == ""


@pytest.mark.parametrize("stated", [False, True])
def test_what_is_refused_does_not_depend_on_what_only_one_side_has_measured(stated: bool) -> None:
    """`estimate` has timed steps and watched rounds; `join` has not yet: both offer the same, or refuse the same."""
    rates = (None, 100_000, 500_000, 1 * MB, 3 * MB, 20 * MB)
    outcomes = set()
    for up, down, share, offered in product(rates, rates, (None, 0.1, 0.5), (1, 3, 8)):
        limits = Limits(upload=up, download=down, gpu_share=share)
        first = keep_up(DEMAND, limits, offered, stated=stated)
        for step_s, round_s in product((None, 0.1, 30.0), (None, 5.0, 5000.0)):
            known = keep_up(replace(DEMAND, round_s=round_s), limits, offered, stated=stated, step_s=step_s)
            assert (known.refusal, known.capacity) == (first.refusal, first.capacity)
            assert int(MIN_STEPS * 100) <= known.inner_steps <= 100
        outcomes.add((bool(first.refusal), first.capacity))
    assert {refused for refused, _ in outcomes} == {True, False}


def test_the_demand_of_a_run_is_that_of_its_terms() -> None:
    terms = Terms(genesis_of(identities(4)))
    demand = demand_of(terms, is_member=True)
    assert demand.crowd.num_members == 4
    assert (demand.expert_acks, demand.crowd.num_replicas) == (terms.expert_acks, terms.replicas)
    assert demand.transfer_s * 1000 == terms.transfer_budget_ms
    assert demand.inner_steps == terms.head.inner_steps


def test_a_newcomer_reckons_with_itself() -> None:
    terms = Terms(genesis_of(identities(4)))
    demand = demand_of(terms, is_member=False)
    assert demand.crowd == crowd_with_one_more(terms.config, terms.head)
    assert demand.crowd.num_members == 5
    assert demand.transfer_s * 1000 > terms.transfer_budget_ms
    assert demand.load_bytes(1) == round_traffic(demand.sizes, demand.crowd, 1).each_way_bytes
