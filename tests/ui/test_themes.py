"""Colours, and the UI without any."""

from __future__ import annotations

import pytest

from spes_p2p.client.ui.app import SwarmApp
from spes_p2p.client.ui.themes import THEME_NAMES, first_theme, next_theme
from spes_p2p.errors import ConfigError
from spes_p2p.node.snapshot import LogEvent
from spes_p2p.testing.handle import imagined_snapshot
from spes_p2p.testing.screens import FakeFeed, reads, screen_colours, settle

SMALL = (80, 24)
VARIED = (imagined_snapshot(), LogEvent(number=1, at_ms=0, level="warning", text="late"))


def test_the_environment_chooses_the_first_theme() -> None:
    assert first_theme({}) == "dark"
    assert first_theme({"SPES_THEME": "light"}) == "light"
    assert first_theme({"SPES_THEME": "light", "NO_COLOR": "1"}) == "mono"
    assert first_theme({"SPES_THEME": "", "NO_COLOR": ""}) == "dark"


def test_an_unknown_theme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="SPES_THEME: 'pink' is no theme; take dark, light, gruvbox, terminal, mono"):
        first_theme({"SPES_THEME": "pink"})


def test_next_theme_comes_round() -> None:
    names, seen = list(THEME_NAMES), ["dark"]
    for _ in names:
        seen.append(next_theme(seen[-1]))
    assert seen == [*names, "dark"]


async def test_no_color_shows_no_colour_and_offers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = SwarmApp([FakeFeed(*VARIED)])
    async with app.run_test(size=SMALL) as pilot:
        text = await reads(pilot, "0*mine", "7 orphan", "▶train", "warning: late", "q quit")
        assert screen_colours(app) == set()
        assert "c theme" not in text
        await pilot.press("c", "question_mark")
        await reads(pilot, "Esc closes it")
        assert screen_colours(app) == set()
    assert app.theme == "mono"


async def test_mono_theme_takes_all_colours_away_and_the_next_brings_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPES_THEME", "terminal")
    app = SwarmApp([FakeFeed(*VARIED)])
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await reads(pilot, "0*mine", "warning: late", "q quit")
        before = screen_colours(app)
        await pilot.press("c")
        await settle(pilot, lambda: screen_colours(app) == set())
        await reads(pilot, "Colours: mono")
        await pilot.press("c")
        await settle(pilot, lambda: bool(screen_colours(app)))
    assert len(before) > 3
