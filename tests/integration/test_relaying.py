"""A relay by our limits, on real daemons: in every start, wherever it listens, and nothing stays of a broken start."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from spes_p2p.bootstrap.options import has_ip6
from spes_p2p.crypto import Identity, peer_text
from spes_p2p.errors import MachineError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network import p2p, relaying
from spes_p2p.network.p2p import RELAY_LIMITS, Daemon, DaemonOptions, RelayLimits, daemon_arguments
from spes_p2p.network.ports import free_port
from spes_p2p.network.relaying import MAX_STARTS, start_relay
from spes_p2p.testing.loopback import until
from spes_p2p.testing.offspring import Offspring

pytestmark = pytest.mark.live

START_S = 60.0
IDENTITY = Identity.from_seed(bytes(32))
DEFAULT_LIMITS = RelayLimits(num_bytes=128 << 10, duration_s=120)
LISTEN = [("/ip4/127.0.0.1/tcp/0",), ("/ip4/127.0.0.1/udp/0/quic-v1",), ("/ip4/0.0.0.0/tcp/0",)]
if has_ip6():
    LISTEN += [("/ip6/::1/tcp/0",), ("/ip6/::1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0")]


@pytest.fixture
def identity_path(tmp_path: Path) -> Path:
    path = tmp_path / "identity.key"
    path.write_bytes(IDENTITY.to_libp2p_bytes())
    return path


@pytest.fixture
def offspring() -> Offspring:
    return Offspring()


def options(identity_path: Path, *listen: str, announce: tuple[str, ...] = ()) -> DaemonOptions:
    return DaemonOptions(identity_path=identity_path, listen=listen or LISTEN[0], announce=announce, relay_service=True)


class OtherRelayFirst:
    """The first starts of a relay are such that the daemon's other relay has the protocol: our own never begins."""

    def __init__(self, num_starts: int) -> None:
        self.num_left = num_starts
        self.num_relays = 0

    def __call__(self, options: DaemonOptions, control_address: str) -> list[str]:
        found = daemon_arguments(options, control_address)
        if not options.relay_service:
            return found
        self.num_relays += 1
        self.num_left -= 1
        return [flag for flag in found if self.num_left < 0 or not flag.startswith("-forceReachability")]


@pytest.mark.parametrize("listen", LISTEN, ids="+".join)
@pytest.mark.parametrize("announce", [(), ("/dns4/boot.example.org/tcp/31337",)], ids=["seen", "announced"])
async def test_a_relay_allows_what_it_is_meant_to_wherever_it_listens(
    identity_path: Path, offspring: Offspring, listen: tuple[str, ...], announce: tuple[str, ...]
) -> None:
    daemon, limits = await start_relay(options(identity_path, *listen, announce=announce))
    try:
        assert limits == RELAY_LIMITS
        assert [child.pid for child in offspring.alive()] == [daemon.pid]
    finally:
        await daemon.stop()


async def test_while_the_other_relay_answers_the_daemon_is_started_again_as_it_was(
    identity_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = OtherRelayFirst(3)
    monkeypatch.setattr(p2p, "daemon_arguments", first)
    route = f"/ip4/127.0.0.1/tcp/{free_port('tcp', '127.0.0.1')}"
    daemon, limits = await start_relay(options(identity_path, route))
    try:
        assert limits == RELAY_LIMITS
        assert first.num_relays >= 4
        assert await daemon.addresses() == (f"{route}/p2p/{peer_text(IDENTITY.peer_id)}",)
    finally:
        await daemon.stop()


async def test_if_it_always_answers_the_relay_is_kept_and_the_log_says_what_it_allows(
    identity_path: Path, offspring: Offspring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = OtherRelayFirst(MAX_STARTS)
    monkeypatch.setattr(p2p, "daemon_arguments", first)
    with caplog.at_level(logging.WARNING, relaying.__name__):
        daemon, limits = await start_relay(options(identity_path))
    try:
        assert (limits, first.num_relays) == (DEFAULT_LIMITS, MAX_STARTS)
        (record,) = caplog.records
        assert "128 KiB instead of 4096 MiB" in record.getMessage()
        assert [child.pid for child in offspring.alive()] == [daemon.pid]
    finally:
        await daemon.stop()


async def test_a_relay_that_gives_no_answer_is_kept_and_nothing_is_claimed_of_it(
    identity_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relaying, "RELAY_STREAM", "/no/such/protocol")
    with caplog.at_level(logging.WARNING, relaying.__name__):
        daemon, limits = await start_relay(options(identity_path))
    try:
        assert limits is None
        assert "cannot be found out" in caplog.text
    finally:
        await daemon.stop()


async def test_a_first_question_that_goes_astray_is_asked_again(
    identity_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask, num_asked = relaying.reserve, 0

    async def astray_once(daemon: Daemon, relay: PeerId) -> RelayLimits:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise TransportError("the connection has ended")
        return await ask(daemon, relay)

    monkeypatch.setattr(relaying, "reserve", astray_once)
    with caplog.at_level(logging.WARNING, relaying.__name__):
        daemon, limits = await start_relay(options(identity_path))
    try:
        assert (limits, caplog.text) == (RELAY_LIMITS, "")
    finally:
        await daemon.stop()


@pytest.mark.parametrize("num_daemons", [1, 2])
async def test_nothing_is_left_of_a_start_that_is_cancelled_while_a_daemon_starts(
    identity_path: Path, offspring: Offspring, num_daemons: int
) -> None:
    async def has_begun() -> bool:
        return len(offspring.alive()) == num_daemons

    starting = asyncio.create_task(start_relay(options(identity_path)))
    await until(has_begun, pause_s=0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert offspring.alive() == []


async def test_nothing_is_left_of_a_start_that_is_cancelled_while_the_relay_is_asked(
    identity_path: Path, offspring: Offspring, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    async def never_told(daemon: Daemon, relay: PeerId) -> RelayLimits:
        is_asked.set()
        return await asyncio.Future()

    monkeypatch.setattr(relaying, "reserve", never_told)
    starting = asyncio.create_task(start_relay(options(identity_path)))
    async with asyncio.timeout(START_S):
        await is_asked.wait()
    assert len(offspring.alive()) == 2
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert offspring.alive() == []


async def test_a_port_in_use_is_named_and_nothing_is_left(identity_path: Path, offspring: Offspring) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} is in use"):
            await start_relay(options(identity_path, f"/ip4/127.0.0.1/tcp/{port}"))
    assert offspring.alive() == []
