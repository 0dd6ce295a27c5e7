"""`/limits` over real HTTP on loopback, and the command that uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from spes_p2p.client.commands.limits import limit_lines
from spes_p2p.errors import ConfigError, MachineError, UnreachableError
from spes_p2p.node.budgets.client import change_limits, read_limits_view
from spes_p2p.node.control import serve_control
from spes_p2p.node.control_client import ControlAddress, read_snapshot
from spes_p2p.node.snapshot import LimitsView, LimitView
from spes_p2p.testing.handle import FakeHandle


class PowerlessHandle(FakeHandle):
    async def change_limits(self, changes: Mapping[str, str]) -> LimitsView:
        if "gpu_power" in changes:
            raise MachineError("--gpu-power 200W: the driver lets only an administrator limit power")
        return await super().change_limits(changes)


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[ControlAddress]:
    async with serve_control(PowerlessHandle(), tmp_path) as address:
        yield address


async def test_limits_are_set_shown_and_taken_away(address: ControlAddress, tmp_path: Path) -> None:
    assert await asyncio.to_thread(read_limits_view, tmp_path) == LimitsView()
    view = await asyncio.to_thread(change_limits, tmp_path, {"upload": "1MB/s", "hours": "22:00-07:00"})
    assert [(row.name, row.limit) for row in view.limits] == [("upload", "1MB/s"), ("hours", "22:00-07:00")]
    assert (await asyncio.to_thread(read_snapshot, tmp_path)).limits == view
    assert [row.name for row in (await asyncio.to_thread(change_limits, tmp_path, {"hours": "off"})).limits] == [
        "upload"
    ]


async def test_what_is_wrong_comes_back_as_the_error_it_was(address: ControlAddress, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--upload: 'slow'"):
        await asyncio.to_thread(change_limits, tmp_path, {"upload": "slow"})
    with pytest.raises(MachineError, match="administrator"):
        await asyncio.to_thread(change_limits, tmp_path, {"gpu_power": "200W"})
    assert await asyncio.to_thread(read_limits_view, tmp_path) == LimitsView()


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 400), (b"[]", 400), (b'{"upload": 1}', 400), (b"{" + b" " * 5000, 413)]
)
async def test_other_bodies_are_refused(address: ControlAddress, body: bytes, status: int) -> None:
    headers = {"Authorization": f"Bearer {address.token}"}
    async with httpx.AsyncClient(base_url=address.url, trust_env=False, headers=headers) as client:
        assert (await client.post("/limits", content=body)).status_code == status
        assert (await client.delete("/limits")).status_code == 405


async def test_the_token_is_asked_for_here_too(address: ControlAddress) -> None:
    async with httpx.AsyncClient(base_url=address.url, trust_env=False) as client:
        assert (await client.get("/limits")).status_code == 401
        assert (await client.post("/limits", content=b"{}")).status_code == 401


def test_without_a_node_it_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no node runs in"):
        change_limits(tmp_path, {"upload": "1MB/s"})


def test_lines_for_people() -> None:
    view = LimitsView(
        limits=(
            LimitView(name="upload", limit="1 MB/s", used="930 kB/s", share=0.93),
            LimitView(name="gpu_share", limit="50%", used="of the trainer's time"),
            LimitView(name="hours", limit="22:00-07:00", used="12:00 now", holds="until 22:00: no training"),
        ),
        note="2 of 4 shards are offered",
    )
    assert list(limit_lines(view)) == [
        "limit      upload 1 MB/s: 930 kB/s",
        "limit      gpu-share 50%: of the trainer's time",
        "limit      hours 22:00-07:00: 12:00 now; until 22:00: no training",
        "line       2 of 4 shards are offered",
    ]
