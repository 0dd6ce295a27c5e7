"""`doctor` and `estimate` against a swarm of real processes: what they say is what the run is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.testing.live import live_swarm, quick_config

pytestmark = pytest.mark.live_long

NAMES = ("ann", "ben")
START_S = 300


@pytest.mark.timeout(900)
def test_a_newcomer_learns_from_a_living_run_what_it_needs_and_joins_nothing(tmp_path: Path) -> None:
    config = quick_config()
    with live_swarm(tmp_path / "swarm", config) as swarm:
        swarm.found(NAMES)
        swarm.wait_round(2, NAMES, START_S)
        folder = tmp_path / "newcomer"

        done = swarm.command("doctor", swarm.link, "--gpu", "none", "--json", "--data-dir", str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
        names = ("entry", "clock", "reach", "relay", "members", "admission")
        assert {name: checks[name]["status"] for name in names} == dict.fromkeys(names, "ok")
        assert checks["entry"]["fact"] == "1 of 1 entry point answer"
        assert "2 members" in checks["members"]["fact"]
        assert checks["relay"]["fact"].startswith("1 of 1")

        bare = swarm.link.partition(",invite=")[0]
        done = swarm.command("doctor", bare, "--gpu", "none", "--data-dir", str(folder))
        assert done.returncode == 5
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("fail")]
        assert line.split()[1] == "admission" and "no invite key" in line and "->" in line

        arguments = ["--gpu", "none", "--json", "--watch", "60", "--data-dir", str(folder), "--upload", "1MB"]
        done = swarm.command("estimate", swarm.link, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads(done.stdout)["figures"]
        assert figures["run"]["values"]["members"] == 2 and figures["run"]["values"]["round"] >= 2
        assert figures["memory"]["values"]["fits"] and figures["memory"]["values"]["shards"] == 2
        assert figures["rounds"]["how"] == "measured now" and figures["rounds"]["values"]["watched"] >= 1
        assert 0 < figures["rounds"]["values"]["round_s"] < 25
        assert figures["steps"]["values"]["steps_per_s"] > 0
        assert figures["deadline"]["values"]["inner_steps"] == 10
        assert figures["deadline"]["values"]["chance"] > 0.5
        assert figures["pace"]["values"]["updates"] > 0
        assert figures["limits"]["values"]["enough"]

        assert not folder.exists()
        seen = swarm.look("ann")
        assert seen is not None and len(seen.network.peers) == 2, "nobody has taken a visitor for a joiner"
        swarm.stop("bootstrap")
        done = swarm.command("doctor", swarm.link, "--gpu", "none", "--data-dir", str(folder))
        assert done.returncode == 5 and "none of the bootstrap addresses" in done.stdout
        done = swarm.command("estimate", swarm.link, "--gpu", "none", "--data-dir", str(folder))
        assert done.returncode == 3 and "none of the bootstrap addresses" in done.stderr
