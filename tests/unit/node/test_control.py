"""The local API over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx
import msgspec
import pytest

from spes_p2p.errors import LocalStateError, UnreachableError
from spes_p2p.node import control_client
from spes_p2p.node.budgets.api import limits_routes
from spes_p2p.node.control import _asking, _looking, serve_control
from spes_p2p.node.control_client import ControlAddress, find_control, read_snapshot
from spes_p2p.node.files import CONTROL_FILE, METRICS_TARGETS_FILE, METRICS_TOKEN_FILE
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot
from spes_p2p.testing.handle import FakeHandle, imagined_snapshot


@pytest.fixture
def handle() -> FakeHandle:
    return FakeHandle()


@pytest.fixture
async def address(handle: FakeHandle, tmp_path: Path) -> AsyncIterator[ControlAddress]:
    async with serve_control(handle, tmp_path) as address:
        yield address


async def get(address: ControlAddress, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address.url, trust_env=False) as client:
        return await client.get(path, headers=headers)


async def test_snapshot_arrives_unchanged(handle: FakeHandle, address: ControlAddress, tmp_path: Path) -> None:
    assert await asyncio.to_thread(read_snapshot, tmp_path) == handle.snapshot()


async def test_leave_recovery_and_stop_reach_the_node(
    handle: FakeHandle, address: ControlAddress, tmp_path: Path
) -> None:
    await asyncio.to_thread(control_client.request_leave, tmp_path)
    await asyncio.to_thread(control_client.request_recovery, tmp_path)
    await asyncio.to_thread(control_client.request_stop, tmp_path)
    assert handle.asked == ["leave", "recover", "stop"]


async def test_stream_carries_old_and_new_log_lines_and_changed_snapshots(
    handle: FakeHandle, address: ControlAddress, tmp_path: Path
) -> None:
    await handle.show(log="first")
    await handle.show(log="second")
    texts: list[str] = []
    rounds: list[int] = []
    async with aclosing(control_client.stream(tmp_path, after=1)) as updates:
        async for update in updates:
            if isinstance(update, LogEvent):
                texts.append(update.text)
                continue
            rounds.append(update.round.number)
            if len(rounds) == 1:
                await handle.show(imagined_snapshot(number=8), log="third")
            if rounds[-1] == 8:
                break
    assert texts == ["second", "third"]
    assert (rounds[0], rounds[-1]) == (7, 8)


async def test_stream_ends_when_the_node_ends(handle: FakeHandle, tmp_path: Path) -> None:
    updates: list[NodeSnapshot | LogEvent] = []
    first = asyncio.Event()

    async def read() -> None:
        async for update in control_client.stream(tmp_path):
            updates.append(update)
            first.set()

    async with serve_control(handle, tmp_path):
        reader = asyncio.create_task(read())
        await first.wait()
    await asyncio.wait_for(reader, 60)
    assert updates[0] == handle.snapshot()


async def test_control_file_is_private_and_goes_with_the_node(handle: FakeHandle, tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    async with serve_control(handle, tmp_path) as address:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert find_control(tmp_path) == address
        assert address.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", ["x", "Bearer", "Bearer wrong"])
async def test_wrong_token_is_refused(address: ControlAddress, token: str) -> None:
    assert (await get(address, "/snapshot", Authorization=token)).status_code == 401


async def test_missing_token_is_refused_on_every_path(handle: FakeHandle, address: ControlAddress) -> None:
    async with httpx.AsyncClient(base_url=address.url, trust_env=False) as client:
        answers = [await client.get(path) for path in ("/snapshot", "/events", "/nothing")]
        answers += [await client.post(path) for path in ("/leave", "/stop", "/pause", "/resume")]
    assert [answer.status_code for answer in answers] == [401] * 7
    assert handle.asked == []


async def test_foreign_host_name_is_refused_even_with_the_token(address: ControlAddress) -> None:
    answer = await get(address, "/snapshot", Authorization=f"Bearer {address.token}", Host="evil.example")
    assert answer.status_code == 421


async def test_leave_by_get_is_refused(handle: FakeHandle, address: ControlAddress) -> None:
    assert (await get(address, "/leave", Authorization=f"Bearer {address.token}")).status_code == 405
    assert handle.asked == []


async def test_bad_event_number_is_refused(address: ControlAddress) -> None:
    answer = await get(address, "/events?after=x", Authorization=f"Bearer {address.token}")
    assert answer.status_code == 400


def test_no_node_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no node runs in"):
        read_snapshot(tmp_path)


def write_address(folder: Path, *, pid: int, port: int = 9) -> None:
    address = ControlAddress(url=f"http://127.0.0.1:{port}", token="t", pid=pid)
    (folder / CONTROL_FILE).write_bytes(msgspec.json.encode(address))


def test_file_of_a_killed_node_counts_as_no_node(tmp_path: Path) -> None:
    write_address(tmp_path, pid=2**22 + 1)  # above the kernel's largest process id
    with pytest.raises(UnreachableError, match="no node runs in"):
        read_snapshot(tmp_path)


async def test_closed_port_counts_as_no_node(tmp_path: Path) -> None:
    write_address(tmp_path, pid=os.getpid(), port=1)
    with pytest.raises(UnreachableError, match="no node runs in"):
        await asyncio.to_thread(read_snapshot, tmp_path)
    with pytest.raises(UnreachableError, match="no node runs in"):
        await anext(control_client.stream(tmp_path))


def test_damaged_file_names_itself_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / CONTROL_FILE).write_text("{")
    with pytest.raises(LocalStateError, match=f"{CONTROL_FILE} is damaged"):
        read_snapshot(tmp_path)


async def test_node_that_does_not_answer_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "TIMEOUT_S", 0.05)
    hold = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hold.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    write_address(tmp_path, pid=os.getpid(), port=server.sockets[0].getsockname()[1])
    with pytest.raises(UnreachableError, match="does not answer"):
        await asyncio.to_thread(read_snapshot, tmp_path)
    with pytest.raises(UnreachableError, match="does not answer"):
        await anext(control_client.stream(tmp_path))
    hold.set()
    server.close()
    await server.wait_closed()


async def test_pause_and_resume_reach_the_node_and_show_in_the_snapshot(
    handle: FakeHandle, address: ControlAddress, tmp_path: Path
) -> None:
    await asyncio.to_thread(control_client.request_pause, tmp_path)
    paused = await asyncio.to_thread(read_snapshot, tmp_path)
    assert paused.paused
    assert paused.pause is not None and paused.pause.reasons == ("pause",)
    await asyncio.to_thread(control_client.request_resume, tmp_path)
    assert not (await asyncio.to_thread(read_snapshot, tmp_path)).paused
    assert handle.asked == ["hold pause", "release pause"]


async def test_log_gives_the_lines_after_a_number(handle: FakeHandle, address: ControlAddress, tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        await handle.show(log=text)
    found = await asyncio.to_thread(control_client.read_log, tmp_path, 1)
    assert [(event.number, event.text) for event in found] == [(2, "second"), (3, "third")]


@pytest.mark.parametrize(
    "path", ["/log?after=-1", "/log?after=x", "/log?after=%D9%A1", "/log?after=1234567890123456789"]
)
async def test_bad_log_number_is_refused(address: ControlAddress, path: str) -> None:
    assert (await get(address, path, Authorization=f"Bearer {address.token}")).status_code == 400


async def test_prometheus_finds_address_and_token_in_files_that_only_the_owner_reads(
    address: ControlAddress, tmp_path: Path
) -> None:
    token = (tmp_path / METRICS_TOKEN_FILE).read_text()
    (target,) = msgspec.json.decode((tmp_path / METRICS_TARGETS_FILE).read_bytes())
    assert stat.S_IMODE((tmp_path / METRICS_TOKEN_FILE).stat().st_mode) == 0o600
    async with httpx.AsyncClient(base_url=f"http://{target['targets'][0]}", trust_env=False) as client:
        answer = await client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nspes_round 7\n" in answer.text


async def test_openapi_describes_every_path_that_is_served(handle: FakeHandle, address: ControlAddress) -> None:
    described = (await get(address, "/openapi.json", Authorization=f"Bearer {address.token}")).json()
    closing = asyncio.Event()
    routes = [*_looking(handle, closing), *_asking(handle), *limits_routes(handle)]
    served = {route.path: route.methods for route in routes}
    assert set(described["paths"]) == set(served)
    for path, methods in served.items():
        assert {method.upper() for method in described["paths"][path]} == methods - {"HEAD"}
    text = json.dumps(described)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names == set(described["components"]["schemas"])
    assert {"NodeSnapshot", "LogEvent", "PauseView", "LeaveView"} <= names


def test_process_that_a_signal_has_stopped_is_named_with_the_remedy() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert not control_client._is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert control_client._is_stopped(process.pid) == sys.platform.startswith("linux")
        process.kill()
