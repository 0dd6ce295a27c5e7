"""What limits mean at a moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import msgspec

from spes_p2p.config import Limits
from spes_p2p.node.budgets.judge import BUSY, ON_BATTERY, Facts, judge, view
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.testing.handle import imagined_snapshot

NOON = Facts(now=datetime(2026, 11, 29, 12, 0))
NIGHT = replace(NOON, now=datetime(2026, 11, 29, 23, 0))
ALL = Limits(
    upload=1_000_000,
    download=4_000_000,
    monthly=100_000_000_000,
    hours="22:00-07:00",
    gpu_share=0.5,
    gpu_power=200,
    idle_only=True,
    pause_on_battery=True,
)


def test_without_limits_nothing_is_held_whatever_the_machine_does() -> None:
    facts = replace(NOON, month_bytes=10**15, others_busy=True, on_battery=True)
    verdict = judge(Limits(), facts)
    assert (verdict.holds, verdict.no_blobs) == ((), "")
    assert view(Limits(), facts).limits == ()


def test_each_limit_holds_for_its_own_reason() -> None:
    assert judge(ALL, NIGHT).holds == ()
    assert judge(ALL, NOON).holds == ("it is outside the hours 22:00-07:00",)
    assert judge(ALL, replace(NIGHT, others_busy=True)).holds == (BUSY,)
    assert judge(ALL, replace(NIGHT, on_battery=True)).holds == (ON_BATTERY,)
    assert judge(ALL, replace(NIGHT, on_battery=None)).holds == ()
    assert len(judge(ALL, replace(NOON, others_busy=True, on_battery=True)).holds) == 3


def test_the_months_bytes_stop_blobs_too() -> None:
    short = judge(ALL, replace(NIGHT, month_bytes=99_999_999_999))
    assert (short.holds, short.no_blobs) == ((), "")
    used_up = judge(ALL, replace(NIGHT, month_bytes=100_000_000_000))
    assert used_up.holds == ("this month's 100 GB are used up",)
    assert used_up.no_blobs == "this month's 100 GB are used up"


def test_the_last_bytes_of_a_month_are_kept_for_what_was_promised() -> None:
    """100 GB, of which 2 were promised: at 98 other blobs stop, at 100 the promised ones too."""
    promised = replace(NIGHT, aside_bytes=2_000_000_000)
    before, kept, used_up = (
        judge(ALL, replace(promised, month_bytes=used)) for used in (97_999_999_999, 98_000_000_000, 100_000_000_000)
    )
    assert (before.no_blobs, before.spares_promised) == ("", False)
    assert kept.no_blobs == "what is left of this month's 100 GB is kept for the hand-over"
    assert (kept.spares_promised, kept.holds) == (True, ())
    assert (used_up.no_blobs, used_up.spares_promised) == ("this month's 100 GB are used up", False)
    assert judge(Limits(), replace(promised, month_bytes=10**12)).no_blobs == ""


def test_people_see_each_limit_what_is_used_and_what_it_holds() -> None:
    facts = replace(
        NOON, month_bytes=150_000_000_000, up_per_s=930_000.0, down_per_s=2e6, others_busy=True, others_cores=1.5,
        on_battery=True, note="2 of 3 shards are offered",
    )  # fmt: skip
    shown = view(ALL, facts)
    rows = {row.name: row for row in shown.limits}
    assert list(rows) == [
        "upload", "download", "monthly", "hours", "idle_only", "pause_on_battery", "gpu_share", "gpu_power",
    ]  # fmt: skip
    assert (rows["upload"].limit, rows["upload"].used, rows["upload"].share) == ("1 MB/s", "930 kB/s", 0.93)
    assert rows["monthly"].share == 1.5
    assert "01.12." in rows["monthly"].holds
    assert rows["hours"].holds == "until 22:00: no training"
    assert "1.5 cores" in rows["idle_only"].used
    assert rows["pause_on_battery"].used == "on battery"
    assert rows["gpu_share"].limit == "50%"
    assert rows["gpu_power"].limit == "200 W"
    assert len(shown.holds) == 4
    assert (shown.no_blobs, shown.note) == ("this month's 100 GB are used up", "2 of 3 shards are offered")
    snapshot = msgspec.structs.replace(imagined_snapshot(), limits=shown)
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=NodeSnapshot) == snapshot


def test_open_hours_and_mains_are_shown_without_a_hold() -> None:
    rows = {row.name: row for row in view(ALL, replace(NIGHT, on_battery=False)).limits}
    assert (rows["hours"].used, rows["hours"].holds) == ("open until 07:00", "")
    assert (rows["pause_on_battery"].used, rows["pause_on_battery"].holds) == ("on mains", "")
    no_battery = {row.name: row for row in view(ALL, NIGHT).limits}
    assert no_battery["pause_on_battery"].used == "no battery"
