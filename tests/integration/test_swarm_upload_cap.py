"""An upload cap of 1 MB/s in a live swarm: held within 10 % over any 10 s while rounds go on, and no update is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.testing.capped import run_capped
from spes_p2p.testing.rates import SentMeter

pytestmark = [
    pytest.mark.live_long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SentMeter.is_possible(), reason="what a process has sent is asked of iproute2's ss"),
]


def test_the_cap_holds_while_rounds_go_on(tmp_path: Path) -> None:
    run = run_capped(tmp_path, 1_000_000, 2)
    assert run.most <= 1.1
    assert run.share_near_cap > 0.1, "the cap was what limited for a part of each round"
    assert run.updates_accepted >= 1
    (upload,) = [limit for limit in json.loads(run.limits)["limits"] if limit["name"] == "upload"]
    assert upload["limit"] == "1 MB/s"
