"""One node in this process, with its real daemon and trainer: however its start ends, nothing is left of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.config import NodeConfig
from spes_p2p.errors import DataError, LocalStateError, MachineError, UnreachableError
from spes_p2p.network.link import InviteLink
from spes_p2p.node.control import NodeHandle
from spes_p2p.node.create import create_run
from spes_p2p.node.files import LEAVE_FILE
from spes_p2p.node.node import Node
from spes_p2p.storage.lock import FolderLock
from spes_p2p.testing.live import quick_config
from spes_p2p.testing.offspring import Offspring

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LISTEN = "/ip4/127.0.0.1/tcp/0"
WAIT_S = 240.0
"""A daemon, PyTorch and some rounds on a machine that may be very busy."""
DOCUMENTS = [bytes([97 + number % 26]) * 400 for number in range(26)]


def founder(tmp_path: Path) -> tuple[NodeConfig, InviteLink]:
    """The only founder of a run, and its link."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    link = create_run(quick_config(), tmp_path / "node", documents=DOCUMENTS)
    return NodeConfig(data_dir=tmp_path / "node", listen=(LISTEN,), data=(text,)), link


@pytest.fixture
def offspring() -> Offspring:
    return Offspring()


def nothing_is_left(data_dir: Path, offspring: Offspring) -> bool:
    FolderLock(data_dir).close()  # raises if it is still held
    return offspring.alive() == []


async def until(handle: NodeHandle, condition: Callable[[NodeHandle], bool]) -> None:
    """Return once a snapshot fits."""
    async with asyncio.timeout(WAIT_S):
        while not condition(handle):
            number = handle.events(0)[-1].number if handle.events(0) else 0
            await handle.wait_change(number, 0.1)


async def begin(node: Node) -> asyncio.Task[int]:
    """Run a node, and return once its local API could be served."""
    ready = asyncio.Event()

    async def on_ready(handle: NodeHandle) -> None:
        ready.set()

    running = asyncio.create_task(node.run(on_ready))
    running.add_done_callback(lambda task: ready.set())
    async with asyncio.timeout(WAIT_S):
        await ready.wait()
    if running.done():
        running.result()
    return running


STAGES: dict[str, Callable[[NodeHandle], bool]] = {
    "trainer": lambda handle: "trainer" in handle.snapshot().round.waiting_for,
    "train": lambda handle: handle.snapshot().round.phase == "train",
}


@pytest.mark.parametrize("stage", ["daemon", *STAGES])
async def test_start_that_is_cancelled_leaves_nothing(tmp_path: Path, offspring: Offspring, stage: str) -> None:
    config, link = founder(tmp_path)
    node = Node(config, link)
    if stage != "daemon":
        running = await begin(node)
        await until(node, STAGES[stage])
    else:
        running = asyncio.create_task(node.run(None))
        async with asyncio.timeout(WAIT_S):
            while not offspring.alive():
                await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert nothing_is_left(config.data_dir, offspring)


async def test_founder_alone_trains_leaves_and_forgets_the_wish(tmp_path: Path, offspring: Offspring) -> None:
    config, link = founder(tmp_path)
    node = Node(config, link)
    running = await begin(node)
    await until(node, lambda handle: handle.snapshot().certified_round >= 2)
    node.request_leave()
    node.request_leave()
    assert (config.data_dir / LEAVE_FILE).exists()
    assert node.snapshot().leaving
    assert await asyncio.wait_for(running, WAIT_S) == 0
    assert not (config.data_dir / LEAVE_FILE).exists()
    assert node.snapshot().certified_round >= 3
    assert nothing_is_left(config.data_dir, offspring)


async def test_leave_that_a_restart_cut_off_is_completed_by_the_next_start(
    tmp_path: Path, offspring: Offspring
) -> None:
    config, link = founder(tmp_path)
    node = Node(config, link)
    running = await begin(node)
    await until(node, lambda handle: handle.snapshot().certified_round >= 1)
    node.request_leave()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    again = Node(config, link)
    assert await asyncio.wait_for(again.run(None), WAIT_S) == 0
    assert any("asked for before this start" in event.text for event in again.events(0))
    assert not (config.data_dir / LEAVE_FILE).exists()
    assert nothing_is_left(config.data_dir, offspring)


async def test_newcomer_that_leaves_before_it_has_found_the_run_ends_at_once(
    tmp_path: Path, offspring: Offspring
) -> None:
    _, link = founder(tmp_path)
    config = NodeConfig(data_dir=tmp_path / "newcomer", listen=(LISTEN,))
    node = Node(config, link)

    async def on_ready(handle: NodeHandle) -> None:
        handle.request_leave()

    assert await asyncio.wait_for(node.run(on_ready), WAIT_S) == 0
    assert not (config.data_dir / LEAVE_FILE).exists()
    assert nothing_is_left(config.data_dir, offspring)


async def test_folder_of_another_run_is_refused(tmp_path: Path, offspring: Offspring) -> None:
    config, link = founder(tmp_path)
    other = InviteLink(run=type(link.run)(b"o" * 32), bootstrap=(), invite_seed=None)
    with pytest.raises(LocalStateError, match="another run"):
        await Node(config, other).run(None)
    assert nothing_is_left(config.data_dir, offspring)


async def test_port_that_is_taken_is_named(tmp_path: Path, offspring: Offspring) -> None:
    config, link = founder(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = config.model_copy(update={"listen": (f"/ip4/127.0.0.1/tcp/{port}",)})
        with pytest.raises(MachineError, match=str(port)):
            await Node(busy, link).run(None)
    assert nothing_is_left(config.data_dir, offspring)


async def test_text_that_is_missing_ends_the_node_and_its_daemon(tmp_path: Path, offspring: Offspring) -> None:
    config, link = founder(tmp_path)
    config.data[0].unlink()
    with pytest.raises(DataError):
        await Node(config, link).run(None)
    assert nothing_is_left(config.data_dir, offspring)


async def test_bootstrap_that_does_not_answer_is_named_with_its_reason(
    tmp_path: Path, offspring: Offspring, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, link = founder(tmp_path)
    closed = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    node = Node(config.model_copy(update={"bootstrap": (closed,)}), link)
    options = node._network_options
    monkeypatch.setattr(node, "_network_options", lambda signed: _hurried(options(signed)))
    with pytest.raises(UnreachableError, match="tcp/9"):
        await node.run(None)
    assert nothing_is_left(config.data_dir, offspring)


def _hurried(options: object) -> object:
    import dataclasses

    return dataclasses.replace(options, reach_timeout_s=1.0)
