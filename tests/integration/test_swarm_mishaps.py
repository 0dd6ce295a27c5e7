"""What befalls single nodes of a running swarm, with real processes: kills, damage, a second process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from spes_p2p.testing.kills import PHASES, contradictions, lost_finals
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

FOUNDERS = ["ada", "ben", "cleo"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """Three founders with rounds of some seconds; every test leaves all three running."""
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.found(FOUNDERS)
        swarm.wait_round(2, FOUNDERS, 120)
        yield swarm


def accepted(swarm: LiveSwarm, name: str) -> int:
    """Round of the newest accepted update of a peer; 0: none."""
    snapshot = swarm.look(name)
    updates = snapshot.learning.updates if snapshot is not None else ()
    return max((update.round for update in updates if update.verdict == "accepted"), default=0)


def test_node_killed_in_a_random_phase_keeps_its_seat_and_fetches_a_damaged_blob_again(swarm: LiveSwarm) -> None:
    swarm.wait_phase("ben", [Random(3).choice(PHASES)], 20)
    known = swarm.finals("ben")
    swarm.kill("ben")  # and no child of its outlives it
    before = swarm.finals("ben")
    assert lost_finals(known, before) == set()
    damaged = (swarm.data_dir("ben") / "blobs" / "whole").glob("*/" + "?" * 64)
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    swarm.restart("ben")
    reached = max(number for _, number in before)
    swarm.wait_round(reached + 2, FOUNDERS, 120)
    after = {name: swarm.finals(name) for name in FOUNDERS}
    assert lost_finals(before, after["ben"]) == set()
    assert contradictions(after) == set()
    ben = swarm.peer_id("ben")
    assert all(ben in record.members for record in swarm.history("ada"))
    assert "damaged blobs were dropped" in (swarm.folder / "ben.log").read_text()
    swarm.wait(lambda: accepted(swarm, "ben") > reached, 90, "accepted update after the restart")


def test_swarm_killed_as_a_whole_goes_on_from_its_newest_certificate(swarm: LiveSwarm) -> None:
    swarm.wait_phase("ada", ["vote", "aggregate"], 20)
    swarm.kill(*FOUNDERS)
    before = {name: swarm.finals(name) for name in FOUNDERS}
    assert contradictions(before) == set()
    for name in FOUNDERS:
        swarm.restart(name)
    newest = max(number for finals in before.values() for _, number in finals)
    swarm.wait_round(newest + 2, FOUNDERS, 120)
    after = {name: swarm.finals(name) for name in FOUNDERS}
    assert [lost_finals(before[name], after[name]) for name in FOUNDERS] == [set()] * 3
    assert contradictions(after) == set()
    assert not any("signed two" in swarm.said(name) for name in FOUNDERS)


def test_killed_trainer_costs_no_round_and_its_node_goes_on(swarm: LiveSwarm) -> None:
    snapshot = swarm.look("cleo")
    assert snapshot is not None
    node = psutil.Process(swarm.children["cleo"].pid)
    trainer = next(child for child in node.children() if "trainer_main" in " ".join(child.cmdline()))
    os.kill(trainer.pid, signal.SIGKILL)
    killed_at = snapshot.certified_round

    def has_restarted() -> bool:
        seen = swarm.look("cleo")
        return seen is not None and seen.machine.trainer_restarts == snapshot.machine.trainer_restarts + 1

    swarm.wait(has_restarted, 60, "restart of the trainer")
    swarm.wait_round(killed_at + 2, FOUNDERS, 90)
    swarm.wait(lambda: accepted(swarm, "cleo") > killed_at, 60, "accepted update after the trainer's death")
    assert "the trainer process died and is started again" in (swarm.folder / "cleo.log").read_text()


def test_second_process_on_a_data_folder_is_told_that_the_identity_is_in_use(swarm: LiveSwarm) -> None:
    folder = str(swarm.data_dir("ada"))
    second = swarm.command("join", swarm.link, "--headless", "--gpu", "none", "--data", str(swarm.texts["ada"]),
                           "--data-dir", folder)  # fmt: skip
    assert second.returncode == 6
    assert "identity in use" in second.stderr
    assert folder in second.stderr
    assert "Traceback" not in second.stderr


def test_copied_identity_is_told_that_it_is_in_use(swarm: LiveSwarm, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    shutil.copy(swarm.data_dir("ada") / "identity.key", copy / "identity.key")
    second = swarm.command("join", swarm.link, "--headless", "--gpu", "none", "--listen", "/ip4/127.0.0.1/tcp/0",
                           "--data", str(swarm.texts["ada"]), "--data-dir", str(copy))  # fmt: skip
    assert second.returncode == 6
    assert "identity in use" in second.stderr
    reached = swarm.certified("ada")
    swarm.wait_round(reached + 1, FOUNDERS, 60)


def test_link_without_invite_key_is_not_admitted(swarm: LiveSwarm, tmp_path: Path) -> None:
    from spes_p2p.network.link import InviteLink, format_link, parse_link

    whole = parse_link(swarm.link)
    link = format_link(InviteLink(run=whole.run, bootstrap=whole.bootstrap, invite_seed=None))
    stranger = swarm.command("join", link, "--headless", "--gpu", "none", "--listen", "/ip4/127.0.0.1/tcp/0",
                             "--data", str(swarm.texts["ada"]), "--data-dir", str(tmp_path / "stranger"))  # fmt: skip
    assert stranger.returncode == 4
    assert "by invitation" in stranger.stderr
    assert json.loads(swarm.output("status", "--json", "--data-dir", str(swarm.data_dir("ada"))))["member"]
