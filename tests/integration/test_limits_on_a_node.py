"""Limits of a real node: set while it runs, kept over a kill, seen in its snapshot; and a line that cannot keep up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest

from spes_p2p.node.budgets.month import MonthCount, month_of
from spes_p2p.node.budgets.store import read_limits, write_month
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(900)]

WAIT_S = 240.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.found(["ada"])
        swarm.wait_round(2, ["ada"], WAIT_S)
        yield swarm


def limits(swarm: LiveSwarm, *changes: str) -> str:
    return swarm.output("limits", *changes, "--data-dir", str(swarm.data_dir("ada")))


def wait_paused(swarm: LiveSwarm, paused: bool) -> None:
    def reached() -> bool:
        snapshot = swarm.look("ada")
        return snapshot is not None and snapshot.paused == paused and bool(snapshot.limits.holds) == paused

    swarm.wait(reached, WAIT_S, f"node that is {'held' if paused else 'not held'}")


def test_hours_hold_training_at_once_and_over_a_kill_until_they_are_taken_away(swarm: LiveSwarm) -> None:
    now = datetime.now()
    later = f"{now + timedelta(hours=3):%H:%M}-{now + timedelta(hours=5):%H:%M}"
    assert f"hours {later}" in limits(swarm, "--hours", later, "--upload", "5MB/s")
    wait_paused(swarm, True)
    assert "no training" in swarm.output("status", "--data-dir", str(swarm.data_dir("ada")))
    swarm.kill("ada")
    swarm.restart("ada")
    wait_paused(swarm, True)
    snapshot = swarm.look("ada")
    assert snapshot is not None and [limit.name for limit in snapshot.limits.limits] == ["upload", "hours"]
    limits(swarm, "--hours", "off")
    wait_paused(swarm, False)
    trained = snapshot.learning.tokens_total

    def goes_on() -> bool:
        present = swarm.look("ada")
        return present is not None and present.learning.tokens_total > trained

    swarm.wait(goes_on, WAIT_S, "certified tokens after the hold")


def test_what_cannot_be_is_refused_in_a_line_and_changes_nothing(swarm: LiveSwarm) -> None:
    assert "upload 5 MB/s" in limits(swarm, "--upload", "5MB/s")
    folder = str(swarm.data_dir("ada"))
    before = read_limits(swarm.data_dir("ada"))
    for change, code, words in ((("--gpu-power", "200W"), 5, "trains on the CPU"), (("--upload", "x"), 2, "--upload")):
        refused = swarm.command("limits", *change, "--data-dir", folder)
        assert (refused.returncode, words in refused.stderr, "Traceback" in refused.stderr) == (code, True, False)
    assert read_limits(swarm.data_dir("ada")) == before
    snapshot = swarm.look("ada")
    assert snapshot is not None and [limit.limit for limit in snapshot.limits.limits] == ["5 MB/s"]


def test_a_line_that_cannot_keep_up_ends_with_5_and_the_numbers(swarm: LiveSwarm) -> None:
    """The second peer of a run whose blobs are far too large for what it allows itself."""
    config = quick_config(min_rate_bytes_per_s=50_000_000, round_max_ms=4_000)
    model = config.model.model_copy(update={"width": 64, "expert_width": 2048})
    folder = swarm.folder / "large"
    with live_swarm(folder, config.model_copy(update={"model": model})) as large:
        large.found(["ada"])
        large.wait_round(1, ["ada"], WAIT_S)
        slow = large.join("ben", large.texts["ada"], "--upload", "50kB/s")

        def ended() -> bool:
            return slow.exit_code() is not None

        large.wait(ended, WAIT_S, "end of a node that cannot keep up")
        assert slow.exit_code() == 5
        assert "--upload 50 kB/s is too slow for this run" in large.said("ben")
        assert "Allow at least --upload" in large.said("ben")


def test_a_leave_in_a_month_that_is_used_up_hands_nothing_over_and_says_so(tmp_path: Path) -> None:
    """Its statement names no hand-over, it does not wait for anybody, and the other one goes on with its shards."""
    with live_swarm(tmp_path, quick_config()) as swarm:
        swarm.found(["ann", "ben"])
        swarm.wait_round(2, ["ann", "ben"], WAIT_S)
        swarm.stop("ben")
        write_month(swarm.data_dir("ben"), MonthCount(month=month_of(date.today()), up_bytes=99_999_999, down_bytes=0))
        swarm.restart("ben")
        reached = swarm.certified("ann")
        swarm.wait_round(reached + 2, ["ann", "ben"], WAIT_S)

        folder = str(swarm.data_dir("ben"))
        swarm.output("limits", "--monthly", "100MB", "--data-dir", folder)

        def used_up() -> bool:
            snapshot = swarm.look("ben")
            return snapshot is not None and bool(snapshot.limits.no_blobs)

        swarm.wait(used_up, WAIT_S, "month that is used up")
        swarm.output("leave", "--data-dir", folder)
        swarm.wait(lambda: swarm.children["ben"].exit_code() is not None, WAIT_S, "end of the leaver")
        assert swarm.children["ben"].exit_code() == 0
        said = re.findall("nothing is handed over: .* given up; .*", swarm.said("ben"))
        assert len(said) == 1 and "this month's 100 MB are used up" in said[0]
        assert "certified values stay in the swarm" in said[0]

        def owns_all() -> bool:
            snapshot = swarm.look("ann")
            return snapshot is not None and len(snapshot.network.peers) == 1

        swarm.wait(owns_all, WAIT_S, "roster of one")
        swarm.wait_round(swarm.certified("ann") + 2, ["ann"], WAIT_S)
        assert "hand-over" not in swarm.said("ann")
