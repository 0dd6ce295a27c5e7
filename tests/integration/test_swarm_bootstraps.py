"""A run with two bootstrap nodes, in real processes: one is killed, newcomers come through the other, and in the end a
newcomer that finds no member gets everything from a mirror."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from spes_p2p.bootstrap.metrics import sum_of
from spes_p2p.client.demo.processes import child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.client.units import exec_start
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(900)]

FOUNDERS = ["ada", "ben", "cleo"]


def figure(swarm: LiveSwarm, name: str, what: str) -> float:
    """One figure of a bootstrap node; -1 while it does not answer."""
    try:
        url = json.loads((swarm.data_dir(name) / "http.json").read_bytes())["url"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/metrics", timeout=10) as answer:
            return sum_of(answer.read().decode(), f"spes_bootstrap_{what}") or 0.0
    except OSError:
        return -1.0


def test_rounds_do_not_notice_a_dead_bootstrap_node_and_newcomers_come_through_the_other(tmp_path: Path) -> None:
    names = [*FOUNDERS, "dan", "eve"]
    texts = {name: tmp_path / "text" / name for name in names}
    deal_texts(list(texts.values()), text_bytes=100_000)
    with live_swarm(tmp_path / "swarm", quick_config()) as swarm:
        swarm.start_bootstrap("first")
        swarm.start_bootstrap("second", "--mirror", "1GB")
        swarm.create_run(FOUNDERS, texts["ada"])
        assert all(f"bootstrap={address}" in swarm.link for address in swarm.addresses.values())
        for name in FOUNDERS:
            swarm.join(name, texts[name])
        swarm.wait_round(2, FOUNDERS, 200)
        swarm.wait(lambda: figure(swarm, "first", "peers") >= 3, 60, "all founders at the first bootstrap node")

        # SIGKILL: rounds go on as before, with everybody, and none of them is tentative
        swarm.kill("first")
        killed_at = swarm.certified("ada")
        swarm.wait_round(killed_at + 3, FOUNDERS, 120)
        records = [record for record in swarm.history("ada") if record.round > killed_at]
        everybody = sorted(swarm.peer_id(name) for name in FOUNDERS)
        assert all(sorted(record.members) == everybody for record in records)
        assert len(swarm.finals("ada")) >= killed_at + 3

        # a newcomer whose link names the dead one first
        swarm.join("dan", texts["dan"])
        swarm.wait_member("dan", killed_at + 1, 200)
        assert figure(swarm, "second", "peers") >= 4

        # restarted by the same command it has the same address, and everybody is back without being told
        address = swarm.addresses["first"]
        swarm.start_bootstrap("first")
        assert swarm.addresses["first"] == address
        swarm.wait(lambda: figure(swarm, "first", "peers") >= 4, 90, "everybody back at the first bootstrap node")
        swarm.wait(lambda: figure(swarm, "first", "round") > killed_at, 60, "the chain at the first bootstrap node")

        # no member is left: a newcomer still gets manifest, held-out set, certificates and state
        reached = swarm.certified("ada")
        swarm.wait(lambda: figure(swarm, "second", "round") >= reached, 60, "the chain at the second one")
        swarm.wait(lambda: figure(swarm, "second", "mirrored_bytes") > 0, 60, "a mirrored state")
        swarm.kill(*FOUNDERS, "dan")
        swarm.join("eve", texts["eve"])
        swarm.wait(lambda: swarm.certified("eve") >= reached, 240, "the chain at a newcomer that found no member")
        # what it has is what the members had certified
        finals = swarm.finals("ada")
        assert all(finals.get(place, value) == value for place, value in swarm.finals("eve").items())


def test_killed_services_start_again_by_their_units_with_the_same_state(tmp_path: Path) -> None:
    """As systemd would after a power cut: by the line in the unit, in the folder and environment that it names."""
    home = tmp_path / "swarm"
    text = tmp_path / "text" / "ada"
    deal_texts([text], text_bytes=100_000)
    with live_swarm(home, quick_config()) as swarm:
        environment = child_environment(home) | {"XDG_CONFIG_HOME": str(tmp_path / "config")}

        def install(*arguments: str) -> tuple[str, ...]:
            subprocess.run(
                [sys.executable, "-m", "spes_p2p.client", "service", "install", *arguments, "--no-start"],
                env=environment,
                cwd=tmp_path,
                check=True,
                timeout=120,
                stdout=subprocess.DEVNULL,
            )
            unit = tmp_path / "config" / "systemd" / "user" / f"spes-p2p-{arguments[0]}.service"
            return exec_start(unit.read_text())

        line = install("bootstrap", "--listen", swarm.listen_address("boot"), "--data-dir", str(home / "boot"))
        swarm.start_bootstrap("boot")
        swarm.create_run(["ada"], text)
        swarm.stop("boot")
        boot = start(line, environment, home / "boot.out")
        try:
            swarm.wait(lambda: swarm.address in (home / "boot.out").read_text(), 90, "the same address")
            listen = swarm.listen_address("ada")
            join = ("join", swarm.link, "--gpu", "none", "--listen", listen, "--data", str(text))
            line = install(*join, "--data-dir", str(swarm.data_dir("ada")))
            assert swarm.link not in line
            peer = swarm.peer_id("ada")
            node = start(line, environment, home / "ada.out")
            try:
                swarm.wait_round(2, ["ada"], 200)
                before = swarm.finals("ada")
            finally:
                node.kill()
                node.wait()
            boot.kill()
            boot.wait()
            boot = start(install_line(tmp_path, "bootstrap"), environment, home / "boot.out")
            swarm.wait(lambda: swarm.address in (home / "boot.out").read_text(), 90, "the same address")
            node = start(line, environment, home / "ada.out")
            try:
                swarm.wait_round(max(number for _, number in before) + 2, ["ada"], 200)
                after = swarm.finals("ada")
                assert after.items() >= before.items()
                assert swarm.peer_id("ada") == peer
                assert json.loads((home / "ada.out").read_text().splitlines()[0])["level"] == "info"
                node.terminate()
                assert node.wait(60) in (0, 130)
            finally:
                node.kill()
                node.wait()
        finally:
            boot.kill()
            boot.wait()


def install_line(tmp_path: Path, what: str) -> tuple[str, ...]:
    return exec_start((tmp_path / "config" / "systemd" / "user" / f"spes-p2p-{what}.service").read_text())


def start(line: tuple[str, ...], environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    """What systemd does with an ExecStart line."""
    with output.open("wb") as file:
        return subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=os.sep
        )
