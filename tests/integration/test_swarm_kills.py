"""SIGKILLs at the worst moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, LEDGER_FILE, MANIFEST_FILE
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.kills import lost_finals
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(1800)]

FOUNDERS = ["ada", "ben", "cleo", "dan"]
STAGE_S = 60.0
REJOIN_S = 120.0
POLL_S = 0.01


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """Four founders; every test leaves them running."""
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.found(FOUNDERS)
        swarm.wait_round(2, FOUNDERS, 180)
        yield swarm


def test_newcomer_killed_at_every_stage_of_its_first_start_joins_in_the_end(swarm: LiveSwarm) -> None:
    folder = swarm.data_dir("eve")

    def has_a_blob() -> bool:
        return any(path.is_file() for path in (folder / BLOBS_FOLDER / "whole").rglob("*"))

    stages: list[Callable[[], bool]] = [
        (folder / IDENTITY_FILE).exists,
        (folder / MANIFEST_FILE).exists,
        has_a_blob,
        (folder / LEDGER_FILE).exists,
        lambda: len(swarm.finals("eve")) > 0,
        lambda: (snapshot := swarm.look("eve")) is not None and snapshot.round.number > 0,
    ]
    peers = set()
    for stage in stages:
        swarm.join("eve", swarm.texts["ada"])
        swarm.wait(stage, STAGE_S, "stage of the first start", POLL_S)
        swarm.kill("eve")
        peers.add(swarm.peer_id("eve"))
    swarm.restart("eve")
    swarm.wait_member("eve", swarm.certified("ada") + 1, REJOIN_S)
    (eve,) = peers
    swarm.wait(lambda: bool(swarm.accepted_bases("ada", eve)), REJOIN_S, "accepted update of the newcomer")
    swarm.stop("eve")


def wait_adoption(swarm: LiveSwarm, name: str) -> int:
    """Until one more certificate is on a peer's disk; returns how many were there before."""
    ledger = Ledger(swarm.data_dir(name) / LEDGER_FILE)
    try:
        known = ledger.count()
        swarm.wait(lambda: ledger.count() > known, STAGE_S, "certificate", POLL_S)
        return known
    finally:
        ledger.close()


def test_node_killed_in_the_moment_of_adoption_has_that_certificate_and_goes_on(swarm: LiveSwarm) -> None:
    for _ in range(3):
        known = wait_adoption(swarm, "ben")
        swarm.kill("ben")
        adopted = swarm.finals("ben")
        assert len(adopted) > known
        swarm.restart("ben")
        swarm.wait_member("ben", max(adopted)[1] + 1, REJOIN_S)
        assert lost_finals(adopted, swarm.finals("ben")) == set()
        assert lost_finals(adopted, swarm.finals("ada")) == set()


def test_node_killed_again_and_again_while_it_starts_comes_back(swarm: LiveSwarm) -> None:
    before = swarm.finals("cleo")
    for waits_for in ("trainer", "certificates", ""):
        swarm.kill("cleo")
        swarm.restart("cleo")

        def is_there(words: str = waits_for) -> bool:
            snapshot = swarm.look("cleo")
            return snapshot is not None and (words in snapshot.round.waiting_for or snapshot.certified_round > 0)

        swarm.wait(is_there, STAGE_S, "start", POLL_S)
    swarm.wait_member("cleo", swarm.certified("ada") + 1, REJOIN_S)
    assert lost_finals(before, swarm.finals("cleo")) == set()
