"""In words: how certain the newest rounds are, what a run that cannot go on waits for, and what recovers it."""

from __future__ import annotations

from spes_p2p.client.output import duration_text
from spes_p2p.node.snapshot import LeaveView, NodeSnapshot

UNSAFE = "unsafe under partition"
ON_PURPOSE = "waits on purpose"
"""Of a run with too few voters: going on would risk that it splits."""


def certified_text(snapshot: NodeSnapshot) -> str:
    """The newest certificate, such as `round 7 tentative, round 5 final`."""
    number = snapshot.certified_round
    if snapshot.round.number == 0:
        return "not known yet: the node is starting"
    if is_tentative(snapshot):
        return f"round {number} tentative, round {snapshot.final_round} final"
    return f"round {number}"


def is_tentative(snapshot: NodeSnapshot) -> bool:
    """Whether the newest certificate is tentative."""
    return snapshot.certified_round > snapshot.final_round


def trouble_texts(snapshot: NodeSnapshot) -> list[tuple[str, str]]:
    """(label, text) of what keeps the run from final certificates, and of recoveries; empty where all is well."""
    found: list[tuple[str, str]] = []
    if snapshot.waiting:
        found.append(("waiting", f"on purpose: {snapshot.waiting}"))
    plan = snapshot.recovery
    # with everybody back the next certificate is final: whoever recovers now would only cut off tentative work
    if plan is not None and (plan.time_left_ms is not None or len(plan.keeps) < len(snapshot.network.peers)):
        kept = f"with {len(plan.keeps)} of {len(snapshot.network.peers)} members, {UNSAFE}"
        if plan.time_left_ms is not None:
            found.append(("recovery", f"by itself in {duration_text(plan.time_left_ms)} {kept}"))
        else:
            found.append(("recovery", f"`spes-p2p run recover` goes on {kept}"))
    if snapshot.epoch:
        found.append(("epoch", f"{snapshot.epoch}, made by a recovery: {UNSAFE}"))
    return found


def leave_text(view: LeaveView | None, waiting_for: str = "") -> str:
    """What remains of a leave, and when it is safe to close: `safe to close in about 40 s; remains: ...`.

    `view` None: the node knows of no step yet, only what it waits for.
    """
    if view is None:
        return f"waits for {waiting_for}" if waiting_for else "asked for"
    if view.safe_to_close:
        return "safe to close"
    when = "not safe to close yet"
    if view.safe_in_ms is not None:
        when = f"safe to close in about {duration_text(view.safe_in_ms)}"
    remains = ", then ".join(step.text for step in view.steps)
    return f"{when}; remains: {remains}" if remains else when
