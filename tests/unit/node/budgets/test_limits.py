"""Limits as people write them, and the files that remember them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.config import Limits
from spes_p2p.errors import ConfigError, LocalStateError
from spes_p2p.node.budgets.limits import changed, rate_text, size_text
from spes_p2p.node.budgets.month import MonthCount
from spes_p2p.node.budgets.store import read_limits, read_month, write_limits, write_month
from spes_p2p.node.files import LIMITS_FILE, MONTH_FILE


def test_all_limits_are_set_changed_and_taken_away() -> None:
    limits = changed(
        Limits(),
        {
            "upload": "1MB/s",
            "download": "4 MiB/s",
            "monthly": "100GB",
            "hours": "22:00-7:00",
            "gpu_share": "50%",
            "gpu_power": "200W",
            "idle_only": "yes",
            "pause_on_battery": "on",
        },
    )
    assert limits == Limits(
        upload=1_000_000,
        download=4 << 20,
        monthly=100_000_000_000,
        hours="22:00-07:00",
        gpu_share=0.5,
        gpu_power=200,
        idle_only=True,
        pause_on_battery=True,
    )
    assert changed(limits, {"upload": "500kB"}).upload == 500_000
    assert changed(limits, {"gpu_share": "0.25"}).gpu_share == 0.25
    assert changed(limits, dict.fromkeys(Limits.model_fields, "off")) == Limits()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("upload", "fast", "--upload: 'fast' is not a rate"),
        ("upload", "8Mbit/s", "is in bits"),
        ("upload", "8Mb/s", "is in bits"),
        ("upload", "10", "has no unit"),
        ("upload", "1kB/s", "too slow"),
        ("upload", "-3MB/s", "--upload"),
        ("download", "0", "has no unit"),
        ("monthly", "1MB", "too little"),
        ("hours", "at night", "--hours: 'at night' is no window"),
        ("gpu_share", "half", "--gpu-share"),
        ("gpu_share", "150%", "between 5% and 100%"),
        ("gpu_share", "nan", "between"),
        ("gpu_power", "0W", "--gpu-power"),
        ("gpu_power", "much", "--gpu-power"),
        ("idle_only", "perhaps", "--idle-only: 'perhaps': say yes or no"),
        ("speed", "1MB/s", "there is no limit 'speed'"),
    ],
)
def test_wrong_texts_are_refused_with_the_flag(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        changed(Limits(), {name: text})


def test_sizes_are_short_for_people() -> None:
    assert [size_text(size) for size in (512, 80_000, 1_250_000, 4e10, 123_456e9)] == [
        "512 B", "80 kB", "1.25 MB", "40 GB", "123 TB",
    ]  # fmt: skip
    assert rate_text(999_999_999) == "1e+03 MB/s" or rate_text(999_999_999) == "1000 MB/s"


def test_limits_survive_a_restart_and_damage_is_named(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits()
    limits = Limits(upload=1_000_000, hours="22:00-07:00", idle_only=True)
    write_limits(tmp_path, limits)
    assert read_limits(tmp_path) == limits
    for text in ("{", '{"uplode": 3}', '{"upload": -1}', ""):
        (tmp_path / LIMITS_FILE).write_text(text)
        with pytest.raises(LocalStateError, match=rf"{LIMITS_FILE} is damaged.*\nDelete it"):
            read_limits(tmp_path)


def test_the_month_survives_a_restart_and_damage_is_named(tmp_path: Path) -> None:
    assert read_month(tmp_path) is None
    count = MonthCount(month="2026-11", up_bytes=5, down_bytes=7)
    write_month(tmp_path, count)
    assert read_month(tmp_path) == count
    (tmp_path / MONTH_FILE).write_text('{"month": 3}')
    with pytest.raises(LocalStateError, match=rf"{MONTH_FILE} is damaged"):
        read_month(tmp_path)
