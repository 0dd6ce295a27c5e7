"""Whether a leave may promise a hand-over: only what the limits let this node serve. Pure.

A limit is a promise to its owner and holds for a leave too. What a leaver promises to the new owners is kept for them:
of the month's bytes the hand-over's are put aside, and other blobs stop when no more than these are left.
"""

from __future__ import annotations

from spes_p2p.config import Limits
from spes_p2p.node.budgets.judge import month_used_up
from spes_p2p.node.budgets.keeping_up import LINE_SHARE, Demand
from spes_p2p.node.budgets.limits import rate_text, size_text

ROUNDS_UNTIL_LET_GO = 2
"""The open round and one more: a leave that is said after its cut is certified with the next one."""
MESSAGES_BYTES = 1_000_000
"""Put aside besides the blobs: frames, chunk lists, and the messages of the wait for the new owners."""


def aside_bytes(handover_bytes: int) -> int:
    """What is put aside of the month for a hand-over of so many bytes."""
    return handover_bytes + MESSAGES_BYTES


def refusal(
    limits: Limits, month_bytes: int, demand: tuple[Demand, int] | None, handover_bytes: int, within_s: float
) -> str:
    """Why a hand-over of so many bytes may not be promised, in one line; empty: it may.

    `month_bytes`: used of this month. `demand`: what the run asks, and how many shards are owned; None: not known.
    `within_s`: for how long the new owners wait. Until the leave is certified this node takes part in
    ROUNDS_UNTIL_LET_GO rounds, whose bytes come first: in them its last update goes out.
    """
    if used_up := month_used_up(limits, month_bytes):
        return used_up
    if limits.monthly is not None:
        left_bytes = limits.monthly - month_bytes
        rounds_bytes = 0 if demand is None else ROUNDS_UNTIL_LET_GO * _round_bytes(*demand)
        if left_bytes < rounds_bytes + aside_bytes(handover_bytes):
            return (
                f"{size_text(left_bytes)} are left of this month's {size_text(limits.monthly)}; "
                f"it would take {size_text(handover_bytes)}, and the rounds until then {size_text(rounds_bytes)}"
            )
    if limits.upload is not None and handover_bytes > limits.upload * LINE_SHARE * within_s:
        takes_s = handover_bytes / (limits.upload * LINE_SHARE)
        return (
            f"with --upload {rate_text(limits.upload)} it would take {takes_s:.0f} s for {size_text(handover_bytes)}, "
            f"and the new owners wait {within_s:.0f} s"
        )
    return ""


def _round_bytes(demand: Demand, num_owned: int) -> int:
    """Both directions."""
    return demand.publish_bytes(num_owned) + demand.load_bytes(num_owned)
