"""What the limits mean at this moment: whether training is held, and blobs are stopped; what people see. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from spes_p2p.config import Limits
from spes_p2p.node.budgets.hours import parse_hours
from spes_p2p.node.budgets.limits import rate_text, size_text
from spes_p2p.node.budgets.month import first_of_next
from spes_p2p.node.snapshot import LimitFigures, LimitsView, LimitView

BUSY = "other programs use this machine"
ON_BATTERY = "this machine runs on its battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was measured."""

    now: datetime
    """Local time."""
    month_bytes: int = 0
    aside_bytes: int = 0
    """Of the month, for a hand-over that was promised (promise.py)."""
    up_per_s: float = 0.0
    down_per_s: float = 0.0
    others_busy: bool = False
    others_cores: float = 0.0
    on_battery: bool | None = None
    """None: there is no battery, or it does not say."""
    note: str = ""
    """How the rates and the run go together (keeping_up.py), for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows."""

    holds: tuple[str, ...]
    """Why training is held, in words that stay the same while it is so; empty: it is not."""
    no_blobs: str
    """Why blobs are neither served nor fetched; empty: they are."""
    spares_promised: bool = False
    """What was promised to new owners is served all the same."""


def judge(limits: Limits, facts: Facts) -> Verdict:
    """Apply the limits."""
    used_up = month_used_up(limits, facts.month_bytes)
    holds = [used_up] if used_up else []
    if limits.hours is not None and not parse_hours(limits.hours).allow(facts.now.time()):
        holds.append(f"it is outside the hours {limits.hours}")
    if limits.idle_only and facts.others_busy:
        holds.append(BUSY)
    if limits.pause_on_battery and facts.on_battery:
        holds.append(ON_BATTERY)
    kept = "" if used_up else _kept_for_handover(limits, facts)
    return Verdict(holds=tuple(holds), no_blobs=used_up or kept, spares_promised=bool(kept))


def month_used_up(limits: Limits, month_bytes: int) -> str:
    """The reason, if this month's bytes are used up; `month_bytes` have passed so far."""
    if limits.monthly is None or month_bytes < limits.monthly:
        return ""
    return f"this month's {size_text(limits.monthly)} are used up"


def _kept_for_handover(limits: Limits, facts: Facts) -> str:
    """The reason, if no more of this month's bytes is left than was promised."""
    if limits.monthly is None or not facts.aside_bytes or facts.month_bytes + facts.aside_bytes < limits.monthly:
        return ""
    return f"what is left of this month's {size_text(limits.monthly)} is kept for the hand-over"


def view(limits: Limits, facts: Facts) -> LimitsView:
    """The limits that are set, for people."""
    verdict = judge(limits, facts)
    figures = LimitFigures(
        upload_bytes_per_s=limits.upload,
        download_bytes_per_s=limits.download,
        month_bytes=limits.monthly,
        gpu_share=limits.gpu_share,
        gpu_power_w=limits.gpu_power,
        month_used_bytes=facts.month_bytes,
    )
    return LimitsView(
        limits=tuple(_rows(limits, facts)),
        holds=verdict.holds,
        no_blobs=verdict.no_blobs,
        note=facts.note,
        figures=figures,
    )


def _rows(limits: Limits, facts: Facts) -> Iterator[LimitView]:
    for name, limit, used in (
        ("upload", limits.upload, facts.up_per_s),
        ("download", limits.download, facts.down_per_s),
    ):
        if limit is not None:
            yield LimitView(name=name, limit=rate_text(limit), used=rate_text(used), share=used / limit)
    if limits.monthly is not None:
        anew = f"until {first_of_next(facts.now.date()):%d.%m.}: no training, no blobs; messages go on"
        yield LimitView(
            name="monthly",
            limit=size_text(limits.monthly),
            used=size_text(facts.month_bytes),
            share=facts.month_bytes / limits.monthly,
            holds=anew if month_used_up(limits, facts.month_bytes) else "",
        )
    if limits.hours is not None:
        yield _hours_row(limits.hours, facts)
    if limits.idle_only:
        others = f"others use {facts.others_cores:.1f} cores"
        yield LimitView(name="idle_only", limit="yes", used=others, holds="no training" if facts.others_busy else "")
    if limits.pause_on_battery:
        source = {None: "no battery", True: "on battery", False: "on mains"}[facts.on_battery]
        holds = "until it is plugged in: no training" if facts.on_battery else ""
        yield LimitView(name="pause_on_battery", limit="yes", used=source, holds=holds)
    if limits.gpu_share is not None:
        yield LimitView(name="gpu_share", limit=f"{limits.gpu_share:.0%}", used="of the trainer's time")
    if limits.gpu_power is not None:
        yield LimitView(name="gpu_power", limit=f"{limits.gpu_power} W", used="set in the driver")


def _hours_row(text: str, facts: Facts) -> LimitView:
    hours, now = parse_hours(text), facts.now.time()
    if hours.allow(now):
        return LimitView(name="hours", limit=text, used=f"open until {hours.ends_at(now)}")
    holds = f"until {hours.begins_at(now)}: no training"
    return LimitView(name="hours", limit=text, used=f"{now:%H:%M} now", holds=holds)
