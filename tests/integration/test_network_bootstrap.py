"""The bootstrap node as a process: what it prints, how it ends, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from spes_p2p.errors import EXIT_INTERRUPTED
from spes_p2p.network.addresses import parse_peer_address, socket_address

pytestmark = pytest.mark.live

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
END_S = 10.0
START_S = 120.0


def command(data_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "spes_p2p.bootstrap.cli", "--data-dir", str(data_dir), *flags]


@contextmanager
def bootstrap(data_dir: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(data_dir, *LISTEN, *flags), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def http_url(data_dir: Path) -> str:
    return str(json.loads((data_dir / "http.json").read_bytes())["url"])


def ends_with(data_dir: Path, *flags: str) -> tuple[int, str]:
    result = subprocess.run(command(data_dir, *flags), capture_output=True, text=True, timeout=START_S, check=False)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) <= 2
    return result.returncode, result.stderr


def can_listen(address: str) -> bool:
    _, host, port = socket_address(parse_peer_address(address).route)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def daemons_of(process: subprocess.Popen[str], most: int) -> list[psutil.Process]:
    """The node's daemons as soon as there are `most` of them."""
    end_s = time.monotonic() + START_S
    while len(found := psutil.Process(process.pid).children()) < most:
        assert time.monotonic() < end_s
    return found


def test_a_bootstrap_node_keeps_its_address_and_leaves_nothing_behind_however_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "bootstrap"
    with bootstrap(folder) as process:
        address = first_line(process)
        assert first_line(process) == f"append to an invite link: ,bootstrap={address}"
        assert not can_listen(address)
        (daemon,) = psutil.Process(process.pid).children()
        assert "-relayService=1" in daemon.cmdline()
        code, error = ends_with(folder, *LISTEN)
        assert (code, "identity in use" in error) == (6, True)
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0
        assert not daemon.is_running()
        assert can_listen(address)
    with bootstrap(folder, "--json") as process:
        line = json.loads(first_line(process))
        assert (line["addresses"], line["peer"]) == ([address], address.rsplit("/", 1)[1])
        assert line["http"] == http_url(folder)
        (daemon,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait(START_S)
        assert psutil.wait_procs([daemon], END_S)[1] == []
        assert can_listen(address)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_node_that_is_ended_while_it_asks_its_relay_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    with bootstrap(tmp_path / "bootstrap") as process:
        found = daemons_of(process, most=2)
        process.send_signal(number)
        code = process.wait(END_S)
        assert first_line(process) == ""  # it was not up, and did not go on until it was
        assert code == (-number if number == signal.SIGKILL else EXIT_INTERRUPTED)
        assert psutil.wait_procs(found, END_S)[1] == []


def test_a_wrong_address_ends_with_2_and_makes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "bootstrap"
    for flags in (("--listen", "/ip/0.0.0.0/tcp/1"), ("--announce", "/ip4/0.0.0.0/tcp/1"), ("--bootstrap", "rubbish")):
        code, error = ends_with(folder, *flags)
        assert (code, "good: " in error) == (2, True)
    assert not folder.exists()


def test_a_port_in_use_ends_with_5_and_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, error = ends_with(tmp_path / "bootstrap", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    assert (code, f"port {port} is in use" in error) == (5, True)


def test_a_daemon_does_not_survive_a_parent_that_ends_without_cleaning_up(tmp_path: Path) -> None:
    identity = tmp_path / "identity.key"
    script = f"""
import asyncio, os
from pathlib import Path
from spes_p2p.crypto import Identity
from spes_p2p.network.p2p import Daemon, DaemonOptions

async def main():
    path = Path({str(identity)!r})
    path.write_bytes(Identity.generate().to_libp2p_bytes())
    daemon = await Daemon.start(DaemonOptions(identity_path=path, listen=("/ip4/127.0.0.1/tcp/0",)))
    print(daemon.pid, flush=True)
    input()
    os._exit(0)

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        assert process.stdout is not None
        daemon = psutil.Process(int(process.stdout.readline()))
        process.communicate("end\n", timeout=START_S)
        assert process.returncode == 0
        assert psutil.wait_procs([daemon], END_S)[1] == []
