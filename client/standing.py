"""In words: how certain the newest rounds are, what a run that cannot go on waits for, and what recovers it."""

from __future__ import annotations

from spes_p2p.client.output import duration_text
from spes_p2p.node.snapshot import NodeSnapshot

UNSAFE = "unsafe under partition"


def certified_text(snapshot: NodeSnapshot) -> str:
    """The newest certificate, such as `round 7 tentative, round 5 final`."""
    number = snapshot.certified_round
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
        found.append(("waiting", snapshot.waiting))
    plan = snapshot.recovery
    if plan is not None:
        kept = f"with {len(plan.keeps)} of {len(snapshot.network.peers)} members, {UNSAFE}"
        if plan.time_left_ms is not None:
            found.append(("recovery", f"by itself in {duration_text(plan.time_left_ms)} {kept}"))
        else:
            found.append(("recovery", f"`spes-p2p run recover` goes on {kept}"))
    if snapshot.epoch:
        found.append(("epoch", f"{snapshot.epoch}, made by a recovery: {UNSAFE}"))
    return found
