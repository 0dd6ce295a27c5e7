"""What Prometheus reads of a node."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import msgspec

from spes_p2p.config import Limits
from spes_p2p.node.budgets.judge import BUSY, ON_BATTERY, Facts, view
from spes_p2p.node.budgets.limits import PARSERS
from spes_p2p.node.metrics import HOLDING, Metric, exposition, metrics_of
from spes_p2p.node.snapshot import PauseView
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot

GUIDE = Path(__file__).parents[3] / "docs" / "volunteer.md"
NOON, NIGHT = datetime(2026, 11, 29, 12, 0), datetime(2026, 11, 29, 23, 0)
LINE = re.compile(r'[a-z_:]+(\{[a-z_]+="([^"\\\n]|\\.)*"(,[a-z_]+="([^"\\\n]|\\.)*")*\})? -?[0-9.e+-]+')


def test_each_metric_has_its_help_and_type_once_before_its_values() -> None:
    text = exposition(metrics_of(imagined_snapshot()))
    helped: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.append(line.split()[2])
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
            assert re.split("[{ ]", line)[0] == helped[-1]
    assert len(helped) == len(set(helped))
    assert text.endswith("\n")


def test_values_are_those_of_the_snapshot() -> None:
    snapshot = msgspec.structs.replace(imagined_snapshot(), paused=True, waiting="2 of 4 voters heard")
    lines = exposition(metrics_of(snapshot)).splitlines()
    for line in (
        "spes_round 7",
        "spes_final_round 6",
        'spes_state{state="paused"} 1',
        'spes_state{state="leaving"} 0',
        "spes_waiting 1",
        'spes_shards{owner="me"} 2',
        'spes_shards{owner="nobody"} 1',
        'spes_shards{owner="others"} 5',
        'spes_network_bytes_total{direction="sent"} 12000000',
        "spes_members 4",
        "spes_members_connected 2",
        "spes_tokens_per_second 12345.6",
        "spes_rounds_adopted_total 6",
    ):
        assert line in lines
    assert any(f'peer="{imagined_peer(0)}"' in line for line in lines if line.startswith("spes_node_info{"))


def limited(facts: Facts, *reasons: str) -> list[str]:
    """Lines of a node with all limits, as these facts have it, whose training is held for these reasons."""
    limits = Limits(
        upload=1_000_000, download=4_000_000, monthly=100_000_000, hours="22:00-07:00", gpu_share=0.5, gpu_power=200,
        idle_only=True, pause_on_battery=True,
    )  # fmt: skip
    pause = PauseView(reasons=reasons, since_ms=0) if reasons else None
    snapshot = msgspec.structs.replace(
        imagined_snapshot(), limits=view(limits, facts), paused=bool(reasons), pause=pause
    )
    return exposition(metrics_of(snapshot)).splitlines()


def test_limits_in_force_and_what_the_month_has_used_are_told_with_their_units() -> None:
    lines = limited(Facts(now=NIGHT, month_bytes=12_345_678))
    for line in (
        "spes_limit_upload_bytes_per_second 1000000",
        "spes_limit_download_bytes_per_second 4000000",
        "spes_limit_month_bytes 100000000",
        "spes_month_bytes 12345678",
        "spes_limit_gpu_share_ratio 0.5",
        "spes_limit_gpu_power_watts 200",
    ):
        assert line in lines
    assert [f'spes_limit_set{{limit="{name}"}} 1' in lines for name in PARSERS] == [True] * len(PARSERS)
    assert {f'spes_training_held{{reason="{name}"}} 0' for name in ("pause", *HOLDING)} <= set(lines)


def test_a_limit_that_is_not_set_has_no_value() -> None:
    lines = exposition(metrics_of(imagined_snapshot())).splitlines()
    values = [line for line in lines if line.startswith("spes_limit_")]
    assert sorted(values) == sorted(f'spes_limit_set{{limit="{name}"}} 0' for name in PARSERS)
    assert "spes_month_bytes 0" in lines


def test_reasons_that_hold_training_are_told_one_by_one_by_names_that_stay() -> None:
    facts = Facts(now=NOON, month_bytes=100_000_000, others_busy=True, on_battery=True)
    words = ("pause", "this month's 100 MB are used up", "it is outside the hours 22:00-07:00", BUSY, ON_BATTERY)
    held = [line for line in limited(facts, *words) if line.startswith("spes_training_held{")]
    assert held == [f'spes_training_held{{reason="{name}"}} 1' for name in ("pause", *HOLDING)]
    held = [line for line in limited(Facts(now=NIGHT), "the disk is full") if line.endswith(" 1") and "_held" in line]
    assert held == ['spes_training_held{reason="the disk is full"} 1']


def test_every_metric_of_limits_and_holds_is_in_the_volunteers_guide() -> None:
    names = {line.split()[2] for line in limited(Facts(now=NOON)) if line.startswith("# HELP spes_limit_")}
    guide = GUIDE.read_text()
    missing = [name for name in (*names, "spes_month_bytes", "spes_training_held") if name not in guide]
    assert len(names) == 6 and not missing


def test_labels_are_escaped() -> None:
    metric = Metric("spes_x", "gauge", "X.", 1, (("run", 'a "b"\\\n'),))
    assert exposition(iter([metric])).splitlines()[-1] == r'spes_x{run="a \"b\"\\\n"} 1'
