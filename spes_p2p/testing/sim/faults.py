"""Faults of a simulated swarm by name.

loss         every line loses some messages
duplication  every line sends some messages twice
reorder      latencies vary widely, so that messages overtake each other
latency      all lines are slow to answer
partition    for a while, two groups cannot reach each other
halves       once or twice, for long, the voters are split into halves
oneway       for a while, one peer's messages to some others do not pass
flapping     for a while, one peer's lines break and mend every second or two
crash        peers die at journal points, and start again
silent       voters are dead for long, sometimes for good: more than the run can do without
freeze       peers stand still (SIGSTOP), and go on
slow         a line is 10 or 100 times too slow
clock        clock rates differ by up to 10 %
twins        a second process with a voter's key
equivocate   a voter signs different values for different receivers
liars        an aggregator states wrong results
withhold     a voter serves no blob
sybils       many join that train nothing
join         peers join
leave        peers leave properly
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.errors import UsageError

LINES = ("loss", "duplication", "reorder", "latency", "partition", "halves", "oneway", "flapping")
PROCESSES = ("crash", "silent", "freeze", "slow", "clock")
BYZANTINE = ("twins", "equivocate", "liars", "withhold")
ROSTER = ("sybils", "join", "leave")
CHURN = ("crash", "join", "leave")
ALL = (*LINES, *PROCESSES, *BYZANTINE, *ROSTER)
GROUPS = {"lines": LINES, "processes": PROCESSES, "byzantine": BYZANTINE, "churn": CHURN}
"""Names that stand for several."""


def parse_faults(text: str) -> frozenset[str]:
    """Names from `all`, `none`, or a list with commas of faults and groups of them. Raises UsageError for others."""
    names = {name.strip() for name in text.split(",")} - {""}
    if names == {"all"}:
        return frozenset(ALL)
    if names == {"none"}:
        return frozenset()
    if names & {"all", "none"}:
        raise UsageError(f"--faults {text}: all and none stand alone")
    unknown = sorted(names - set(ALL) - set(GROUPS))
    if unknown or not names:
        what = f"unknown: {', '.join(unknown)}" if unknown else "names nothing"
        raise UsageError(
            f"--faults {text}: {what}\nChoose all, none, or some of {', '.join(ALL)}; "
            f"{', '.join(GROUPS)} stand for several."
        )
    return frozenset(fault for name in names for fault in GROUPS.get(name, (name,)))


def faults_text(names: Iterable[str]) -> str:
    """What `parse_faults` reads."""
    chosen = [name for name in ALL if name in set(names)]
    if len(chosen) == len(ALL):
        return "all"
    return ",".join(chosen) or "none"
