"""Feeds for the terminal UI, and an environment that does not choose its colours."""

from __future__ import annotations

import pytest

from spes_p2p.testing.screens import FakeFeed


@pytest.fixture(autouse=True)
def _own_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("SPES_THEME", raising=False)


@pytest.fixture
def feed() -> FakeFeed:
    return FakeFeed()
