"""SIGKILLs in numbers: the scenario of `spes_p2p.testing.kills`. It has a file of its own, since a swarm that several
tests share would run beside it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spes_p2p.testing.kills import Scale, lines, run_kills

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(1800)]


def test_twenty_random_kills_lose_nothing_fork_nothing_and_stop_no_learning(tmp_path: Path) -> None:
    figures = run_kills(tmp_path, Scale())
    print("", *lines(figures), sep="\n")
    assert figures.rounds_final >= 20
    assert figures.lost == 0
    assert figures.contradicting == 0
    assert figures.accused == 0
    assert len(figures.rejoin_s) >= 15  # of a victim that was killed again while it started, only the last start counts
    assert figures.rejoin_s_p95 < 60
    assert all(after < before for before, after in pairwise(figures.held_out))
