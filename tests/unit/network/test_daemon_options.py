from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spes_p2p.network import launch, sockets
from spes_p2p.network.p2p import DaemonOptions, daemon_arguments

RELAY = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def arguments(listen: str, *, relay_service: bool, relays: tuple[str, ...] = ()) -> list[str]:
    options = DaemonOptions(
        identity_path=Path("identity.key"), listen=(listen,), relay_service=relay_service, relays=relays
    )
    return daemon_arguments(options, "/unix/tmp/daemon.sock")


def test_a_volunteer_does_not_relay_for_strangers_and_a_bootstrap_node_does() -> None:
    assert "-relayService=0" in arguments("/ip4/0.0.0.0/tcp/0", relay_service=False)
    assert "-relayService=1" in arguments("/ip4/0.0.0.0/tcp/0", relay_service=True)


def test_a_volunteer_with_bootstrap_nodes_may_be_reached_through_them() -> None:
    found = arguments("/ip4/0.0.0.0/tcp/0", relay_service=False, relays=(RELAY,))
    assert "-autoRelay=1" in found
    assert f"-trustedRelays={RELAY}" in found


def test_on_loopback_neither_relays_nor_the_router_are_asked() -> None:
    found = arguments("/ip4/127.0.0.1/tcp/0", relay_service=False, relays=(RELAY,))
    assert {"-autoRelay=0", "-natPortMap=0"} <= set(found)
    assert not [argument for argument in found if argument.startswith("-trustedRelays")]


def test_a_launched_program_does_not_start_when_its_parent_has_gone() -> None:
    command = [sys.executable, launch.__file__, "1", sys.executable, "-c", "print('started')"]
    result = subprocess.run(command, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (1, b"") if sys.platform == "linux" else result.returncode == 0


def test_a_launched_program_gets_its_arguments() -> None:
    code = "import sys; print(sys.argv[1:])"
    command = [sys.executable, launch.__file__, str(os.getpid()), sys.executable, "-c", code, "-a=1", "b c"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"['-a=1', 'b c']\n"


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_an_abandoned_socket_folder_is_swept_and_one_in_use_is_not(tmp_path: Path) -> None:
    abandoned, young, foreign = (tmp_path / name for name in ("spes-p2p-a", "spes-p2p-b", "another"))
    for folder in (abandoned, young, foreign):
        folder.mkdir()
        (folder / "daemon.sock").touch()
    held = sockets.SocketFolder(tmp_path)
    for folder in (abandoned, foreign, held.path):
        age(folder)
    sockets.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["another", "spes-p2p-b", held.path.name])
    held.close()
    assert not held.path.exists()


def test_a_socket_folder_is_private() -> None:
    folder = sockets.SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()


def test_a_bootstrap_node_has_room_for_many_peers_and_does_not_wait_to_be_found_public() -> None:
    relays = set(arguments("/ip4/0.0.0.0/tcp/0", relay_service=True))
    assert {"-forceReachabilityPublic=1", "-connHi=4608"} <= relays
    assert {"-relayDataLimit=4294967296", "-relayTimeLimit=1800s"} <= relays
    assert not [flag for flag in arguments("/ip4/0.0.0.0/tcp/0", relay_service=False) if "Public" in flag]


def test_without_an_identity_the_daemon_makes_a_key_of_its_own() -> None:
    options = DaemonOptions(identity_path=None, listen=("/ip4/127.0.0.1/tcp/0",))
    assert not [flag for flag in daemon_arguments(options, "/unix/tmp/daemon.sock") if flag.startswith("-id=")]
