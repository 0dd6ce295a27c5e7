"""What a user sees of tentative rounds, of a run that waits, and of recoveries; and the command that recovers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from spes_p2p.client.commands.recover import DANGER
from spes_p2p.client.commands.status import status_lines
from spes_p2p.client.progress import Progress
from spes_p2p.client.ui.status_line import status_text
from spes_p2p.node.control import serve_control
from spes_p2p.node.snapshot import NodeSnapshot, RecoveryView
from spes_p2p.testing.handle import FakeHandle, imagined_peer, imagined_snapshot

Run = Callable[..., Any]
WAITING = "2 of 4 voters heard, 3 needed"
PLAN = RecoveryView(keeps=(imagined_peer(0), imagined_peer(1)), time_left_ms=500_000)


def snapshot_with(**changes: object) -> NodeSnapshot:
    return msgspec.structs.replace(imagined_snapshot(), **changes)


def test_status_tells_final_from_tentative_rounds() -> None:
    assert "certified  round 6" in list(status_lines(imagined_snapshot()))
    assert "certified  round 6 tentative, round 4 final" in list(status_lines(snapshot_with(final_round=4)))


def test_a_run_that_waits_says_for_whom_and_what_recovers_it() -> None:
    lines = list(status_lines(snapshot_with(final_round=4, waiting=WAITING, holds_recovery_key=True, recovery=PLAN)))
    assert f"waiting    on purpose: {WAITING}" in lines
    assert "recovery   by itself in 8 min 20 s with 2 of 4 members, unsafe under partition" in lines
    told = snapshot_with(recovery=msgspec.structs.replace(PLAN, time_left_ms=None))
    assert "recovery   `spes-p2p run recover` goes on with 2 of 4 members, unsafe under partition" in list(
        status_lines(told)
    )
    assert "epoch      1, made by a recovery: unsafe under partition" in list(status_lines(snapshot_with(epoch=1)))


def test_the_status_line_of_the_terminal_says_the_same() -> None:
    text = status_text(snapshot_with(final_round=4, waiting=WAITING, epoch=1), "", 0, 0.0)
    assert f"round 6 tentative, round 4 final · waiting: on purpose: {WAITING} · epoch: 1, made by a recovery" in text
    assert "round 6 certified" in status_text(imagined_snapshot(), "", 0, 0.0)


async def test_plain_lines_name_tentative_rounds_and_a_branch_that_was_left_is_no_news() -> None:
    capture = structlog.testing.LogCapture()
    structlog.configure(processors=[capture])
    try:
        handle = FakeHandle(imagined_snapshot(number=7))
        progress = Progress(structlog.get_logger())
        progress.look(handle)
        for number, final in ((8, 6), (7, 6), (8, 7)):
            await handle.show(msgspec.structs.replace(imagined_snapshot(number=number), final_round=final))
            progress.look(handle)
    finally:
        structlog.reset_defaults()
    told = [entry["event"] for entry in capture.entries if "certified" in entry["event"]]
    assert told == ["round 7 certified tentatively", "round 7 certified"]


async def recover(spes_p2p: Run, folder: Path, snapshot: NodeSnapshot, *flags: str) -> tuple[Any, list[str]]:
    """Answer of the command beside a node with this snapshot, and what it asked of the node."""
    handle = FakeHandle(snapshot)
    async with serve_control(handle, folder):
        answer = await asyncio.to_thread(spes_p2p, "run", "recover", "--data-dir", folder, *flags)
    return answer, handle.asked


async def test_recover_names_the_danger_and_asks_the_node(spes_p2p: Run, tmp_path: Path) -> None:
    snapshot = snapshot_with(final_round=4, waiting=WAITING, holds_recovery_key=True, recovery=PLAN)
    answer, asked = await recover(spes_p2p, tmp_path, snapshot, "--yes")
    assert (answer.code, answer.err, asked) == (0, "", ["recover"])
    lines = answer.out.splitlines()
    assert lines[0] == f"the last final certificate is of round 4; {WAITING}"
    assert lines[1:3] == ["stay      …AAAA0000, …BBBB0001", "left out  …CCCC0002, …DDDD0003"]
    assert lines[3] == DANGER and "unsafe under partition" in DANGER
    assert lines[4] == "epoch 1 has begun in round 6, with 4 members"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "does not hold the run's recovery key"),
        ({"holds_recovery_key": True}, "this run can go on"),
        ({"holds_recovery_key": True, "recovery": PLAN}, "nobody is here to confirm this"),
    ],
)
async def test_recover_does_nothing_without_a_key_a_need_or_a_word(
    spes_p2p: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    answer, asked = await recover(spes_p2p, tmp_path, snapshot_with(**changes))
    assert (answer.code, asked) == (2, [])
    assert words in answer.err


async def test_recover_that_is_not_confirmed_does_nothing(
    spes_p2p: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    answer, asked = await recover(spes_p2p, tmp_path, snapshot_with(holds_recovery_key=True, recovery=PLAN))
    assert (answer.code, asked) == (2, [])
    assert "nothing was done" in answer.err


def test_a_recovery_is_not_proposed_once_everybody_is_back() -> None:
    everybody = tuple(view.peer for view in imagined_snapshot().network.peers)
    back = snapshot_with(final_round=4, recovery=RecoveryView(keeps=everybody, time_left_ms=None))
    assert not any("recover" in line for line in status_lines(back))


def test_a_run_that_waits_on_purpose_waits_for_nothing_else() -> None:
    snapshot = snapshot_with(waiting=WAITING)
    view = msgspec.structs.replace(snapshot.round, waiting_for="acknowledgements of this node's update")
    (line,) = [
        line for line in status_lines(msgspec.structs.replace(snapshot, round=view)) if line.startswith("round ")
    ]
    assert f"waits on purpose: {WAITING}" in line
    assert "acknowledgements" not in line


def test_a_node_that_is_starting_names_no_round() -> None:
    snapshot = imagined_snapshot()
    view = msgspec.structs.replace(snapshot.round, number=0, phase="load", phases=(), leader="")
    starting = msgspec.structs.replace(snapshot, round=view, certified_round=0, voter=False, member=False)
    assert "certified  not known yet: the node is starting" in list(status_lines(starting))
    assert "round 0" not in status_text(starting, "", 0, 0.0)
