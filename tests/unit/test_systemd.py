"""What systemd hears, over a socket as it makes it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.systemd import Notifier, notifying


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(30)
        yield made


def heard(listener: socket.socket) -> str:
    return listener.recv(100).decode()


async def test_ready_alive_and_stopping_are_told(tmp_path: Path, listener: socket.socket) -> None:
    environment = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "30000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    listener.setblocking(False)
    async with notifying(environment):
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            said = [(await loop.sock_recv(listener, 100)).decode() for _ in range(3)]
    assert said == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
    rest = []
    while not rest or rest[-1] != "STOPPING=1":
        rest.append(heard(listener))
    assert set(rest) <= {"WATCHDOG=1", "STOPPING=1"}


async def test_one_sign_of_life_that_comes_late_does_not_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least two are on their way within systemd's limit."""
    pauses_s: list[float] = []

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "30000000"}).keep_alive()
    assert pauses_s == [10.0]


async def test_without_a_watchdog_there_are_no_signs_of_life(tmp_path: Path, listener: socket.socket) -> None:
    for watchdog in (
        {},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "x"},
    ):
        async with notifying({"NOTIFY_SOCKET": str(tmp_path / "notify"), **watchdog}) as notifier:
            assert notifier.watchdog_s is None
        assert [heard(listener), heard(listener)] == ["READY=1", "STOPPING=1"]


async def test_without_systemd_nothing_is_sent_and_a_dead_socket_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier({}).tell("READY=1")
    assert not caplog.records
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).tell("READY=1")
    assert "systemd was not told READY=1" in caplog.text


def test_an_abstract_socket_is_reached() -> None:
    name = f"spes-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(30)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1")
        assert heard(listener) == "READY=1"
