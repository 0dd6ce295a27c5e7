"""What befalls single nodes of a running swarm, with real processes: kills, damage, a second process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

FOUNDERS = ["ada", "ben", "cleo"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    found = {name: folder / name for name in FOUNDERS}
    deal_texts(list(found.values()), text_bytes=100_000)
    return found


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, Path]) -> Iterator[LiveSwarm]:
    """Three founders with rounds of some seconds; every test leaves all three running."""
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.start_bootstrap()
        swarm.create_run(FOUNDERS, texts["ada"])
        for name in FOUNDERS:
            swarm.join(name, texts[name])
        swarm.wait_round(2, FOUNDERS, 120)
        yield swarm


def accepted(swarm: LiveSwarm, name: str) -> int:
    """Round of the newest accepted update of a peer; 0: none."""
    snapshot = swarm.look(name)
    updates = snapshot.learning.updates if snapshot is not None else ()
    return max((update.round for update in updates if update.verdict == "accepted"), default=0)


def test_killed_node_keeps_its_seat_and_fetches_a_damaged_blob_again(swarm: LiveSwarm, texts: dict[str, Path]) -> None:
    before = swarm.history("ben")
    swarm.kill("ben")
    damaged = (swarm.data_dir("ben") / "blobs" / "whole").glob("*/" + "?" * 64)
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    swarm.join("ben", texts["ben"])
    reached = before[-1].round
    swarm.wait_round(reached + 2, FOUNDERS, 120)
    after = swarm.history("ben")
    assert [record.psi_digest for record in after[:reached]] == [record.psi_digest for record in before]
    ben = swarm.peer_id("ben")
    assert all(ben in record.members for record in swarm.history("ada"))
    assert "damaged blobs were dropped" in (swarm.folder / "ben.log").read_text()
    swarm.wait(lambda: accepted(swarm, "ben") > reached, 90, "accepted update after the restart")


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


def test_second_process_on_a_data_folder_is_told_that_the_identity_is_in_use(
    swarm: LiveSwarm, texts: dict[str, Path]
) -> None:
    folder = str(swarm.data_dir("ada"))
    second = swarm.command("join", swarm.link, "--headless", "--gpu", "none", "--data", str(texts["ada"]),
                           "--data-dir", folder)  # fmt: skip
    assert second.returncode == 6
    assert "identity in use" in second.stderr
    assert folder in second.stderr
    assert "Traceback" not in second.stderr


def test_copied_identity_is_told_that_it_is_in_use(swarm: LiveSwarm, texts: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    shutil.copy(swarm.data_dir("ada") / "identity.key", copy / "identity.key")
    second = swarm.command("join", swarm.link, "--headless", "--gpu", "none", "--listen", "/ip4/127.0.0.1/tcp/0",
                           "--data", str(texts["ada"]), "--data-dir", str(copy))  # fmt: skip
    assert second.returncode == 6
    assert "identity in use" in second.stderr
    reached = swarm.certified("ada")
    swarm.wait_round(reached + 1, FOUNDERS, 60)


def test_link_without_invite_key_is_not_admitted(swarm: LiveSwarm, texts: dict[str, Path], tmp_path: Path) -> None:
    from spes_p2p.network.link import InviteLink, format_link, parse_link

    whole = parse_link(swarm.link)
    link = format_link(InviteLink(run=whole.run, bootstrap=whole.bootstrap, invite_seed=None))
    stranger = swarm.command("join", link, "--headless", "--gpu", "none", "--listen", "/ip4/127.0.0.1/tcp/0",
                             "--data", str(texts["ada"]), "--data-dir", str(tmp_path / "stranger"))  # fmt: skip
    assert stranger.returncode == 4
    assert "by invitation" in stranger.stderr
    assert json.loads(swarm.output("status", "--json", "--data-dir", str(swarm.data_dir("ada"))))["member"]
