"""A leave promises a hand-over only if the limits let this node serve it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.config import Limits
from spes_p2p.node.budgets.keeping_up import LINE_SHARE, Demand
from spes_p2p.node.budgets.promise import MESSAGES_BYTES, ROUNDS_UNTIL_LET_GO, refusal
from spes_p2p.node.traffic import Crowd
from spes_p2p.protocol.params import PieceSizes

MB = 1_000_000
DEMAND = Demand(
    sizes=PieceSizes(
        expert_blob_bytes=10 * MB, psi_piece_bytes=MB, part_result_bytes=4 * MB, num_parts=1, num_shards=4
    ),
    crowd=Crowd(num_members=4, num_eligible=4, num_replicas=2),
    expert_acks=1,
    inner_steps=100,
    transfer_s=60.0,
    round_max_s=300.0,
)
MONTH = Limits(monthly=10_000 * MB)
ROUNDS = ROUNDS_UNTIL_LET_GO * (DEMAND.publish_bytes(2) + DEMAND.load_bytes(2))


def test_without_limits_everything_may_be_promised() -> None:
    assert refusal(Limits(), 10**15, (DEMAND, 2), 10**15, 0.0) == ""


@pytest.mark.parametrize("used", [10_000 * MB, 10_001 * MB])
def test_a_month_that_is_used_up_promises_nothing(used: int) -> None:
    assert refusal(MONTH, used, (DEMAND, 2), 1, 600.0) == "this month's 10 GB are used up"


def test_what_is_left_has_to_last_for_the_rounds_until_then_and_for_the_hand_over() -> None:
    handover = 120 * MB
    just = 10_000 * MB - ROUNDS - handover - MESSAGES_BYTES
    assert refusal(MONTH, just, (DEMAND, 2), handover, 600.0) == ""
    words = refusal(MONTH, just + 1, (DEMAND, 2), handover, 600.0)
    assert "are left of this month's 10 GB; it would take 120 MB, and the rounds until then" in words
    assert refusal(MONTH, just + 1, (replace(DEMAND, crowd=Crowd(num_members=2, num_eligible=2, num_replicas=1)), 2),
                   handover, 600.0) == ""  # fmt: skip


def test_before_the_run_is_known_only_the_hand_over_counts() -> None:
    assert refusal(MONTH, 9_000 * MB, None, 999 * MB, 600.0) == ""
    assert refusal(MONTH, 9_000 * MB, None, 1000 * MB, 600.0) != ""


def test_an_upload_that_takes_longer_than_new_owners_wait_promises_nothing() -> None:
    limits = Limits(upload=MB)
    assert refusal(limits, 0, (DEMAND, 2), round(99 * LINE_SHARE * MB), 100.0) == ""
    words = refusal(limits, 0, (DEMAND, 2), round(200 * LINE_SHARE * MB), 100.0)
    assert words == "with --upload 1 MB/s it would take 200 s for 180 MB, and the new owners wait 100 s"
