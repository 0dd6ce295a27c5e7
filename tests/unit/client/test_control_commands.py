"""`pause`, `resume`, `leave` and `attach` against the local API of a node that is none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_p2p.client.commands import attach
from spes_p2p.client.commands.status import status_lines
from spes_p2p.client.standing import leave_text
from spes_p2p.client.tie import LET_GO
from spes_p2p.node import control_client
from spes_p2p.node.control import serve_control
from spes_p2p.node.files import LEAVE_FILE
from spes_p2p.node.snapshot import LeaveStep, LeaveView, NodeSnapshot
from spes_p2p.testing.handle import FakeHandle


class ServedHandle:
    """A handle behind a local API in a thread, as another process would be."""

    def __init__(self, folder: Path) -> None:
        self.handle = FakeHandle()
        self._folder = folder
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._up.wait(60)

    async def _serve(self) -> None:
        self._ending = asyncio.Event()
        async with serve_control(self.handle, self._folder):
            self._up.set()
            await self._ending.wait()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedHandle]:
    served = ServedHandle(tmp_path)
    yield served
    if served._thread.is_alive():
        served.end()


def test_pause_says_how_long_the_shards_are_kept_and_resume_ends_it(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object]
) -> None:
    answer = spes_p2p("pause", "--data-dir", tmp_path)
    assert (answer.code, answer.out) == (0, "paused; shard 0 kept for 2 rounds\n")
    assert "leases     shard 0 kept for 2 rounds" in spes_p2p("status", "--data-dir", tmp_path).out
    answer = spes_p2p("resume", "--data-dir", tmp_path)
    assert (answer.code, answer.out) == (0, "training goes on\n")
    assert node.handle.asked == ["hold pause", "release pause"]


def test_resume_names_what_else_holds_training(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.handle.set_hold("on battery", True)
    monkeypatch.setattr(node.handle, "set_hold", lambda reason, held: None)
    answer = spes_p2p("resume", "--data-dir", tmp_path)
    assert answer.out == "the pause is over; training is still held: on battery\n"


def test_leave_now_stops_and_waits_for_nothing(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object]
) -> None:
    assert spes_p2p("leave", "--now", "--data-dir", tmp_path).code == 0
    assert node.handle.asked == ["stop"]
    answer = spes_p2p("leave", "--now", "--wait", "--data-dir", tmp_path)
    assert (answer.code, "give one of them" in answer.err) == (2, True)
    assert node.handle.asked == ["stop"]


def test_leave_that_waits_tells_what_remains_until_the_node_has_ended(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object]
) -> None:
    before = node.handle.request_leave

    def leave() -> None:
        before()
        threading.Timer(0.2, node.end).start()

    node.handle.request_leave = leave  # type: ignore[method-assign]  # the node ends by itself when it is asked to leave
    answer = spes_p2p("leave", "--wait", "--data-dir", tmp_path)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "left the run"


def test_leave_that_waits_does_not_take_a_silent_node_for_one_that_has_left(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "TIMEOUT_S", 0.5)
    snapshot, never = node.handle.snapshot, threading.Event()

    def frozen() -> NodeSnapshot:
        never.wait(2.0)
        return snapshot()

    node.handle.snapshot = frozen  # type: ignore[method-assign]  # its whole thread stands still
    threading.Timer(4.0, node.end).start()
    answer = spes_p2p("leave", "--wait", "--data-dir", tmp_path)
    assert answer.code == 0
    assert "does not answer" in answer.out
    assert answer.out.splitlines()[-1] == "left the run"


def test_leave_that_waits_says_that_the_node_was_ended_before(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object]
) -> None:
    (tmp_path / LEAVE_FILE).touch()  # as a node keeps it until it has left
    threading.Timer(0.2, node.end).start()
    answer = spes_p2p("leave", "--wait", "--data-dir", tmp_path)
    assert (answer.code, "ended before it had left" in answer.err) == (3, True)
    assert "left the run" not in answer.out


def test_attach_needs_a_node_and_a_terminal(tmp_path: Path, spes_p2p: Callable[..., object]) -> None:
    answer = spes_p2p("attach", "--data-dir", tmp_path)
    assert (answer.code, "no node runs in" in answer.err) == (3, True)
    served = ServedHandle(tmp_path)
    try:
        answer = spes_p2p("attach", "--data-dir", tmp_path)
        assert (answer.code, "needs a terminal" in answer.err) == (2, True)
    finally:
        served.end()


def test_attach_says_whether_the_node_goes_on(
    node: ServedHandle, tmp_path: Path, spes_p2p: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "is_terminal", lambda: True)
    monkeypatch.setattr(attach, "_show", lambda folder: None)
    assert "the node goes on" in spes_p2p("attach", "--data-dir", tmp_path).out
    monkeypatch.setattr(attach, "_show", lambda folder: node.end())
    assert "the node has ended" in spes_p2p("attach", "--data-dir", tmp_path).out
    assert node.handle.asked == []


def test_background_and_json_lines_exclude_each_other(tmp_path: Path, spes_p2p: Callable[..., object]) -> None:
    answer = spes_p2p("join", f"spes-p2p:{'1f' * 32}", "--detach", "--log-json", "--data-dir", tmp_path)
    assert (answer.code, "--detach and --log-json" in answer.err) == (2, True)


def test_what_remains_of_a_leave_in_words() -> None:
    steps = (LeaveStep(name="certificate", text="the certificate"), LeaveStep(name="successors", text="the heirs"))
    text = leave_text(LeaveView(steps=steps, safe_in_ms=40_000))
    assert text == "safe to close in about 40 s; remains: the certificate, then the heirs"
    assert leave_text(LeaveView(steps=steps)) == "not safe to close yet; remains: the certificate, then the heirs"
    assert leave_text(LeaveView()) == "not safe to close yet"
    assert leave_text(LeaveView(safe_to_close=True, safe_in_ms=0)) == "safe to close"


def test_leave_of_which_the_node_knows_no_step_yet_says_what_it_waits_for() -> None:
    assert leave_text(None, "the end of this round's training") == "waits for the end of this round's training"
    assert leave_text(None) == "asked for"


def test_status_says_that_the_node_is_paused() -> None:
    handle = FakeHandle()
    handle.set_hold("pause", True)
    lines = list(status_lines(handle.snapshot()))
    assert "paused     for 0 s: pause" in lines


def test_a_process_that_was_let_go_of_is_not_ended() -> None:
    code = "from spes_p2p.client.tie import tie_to_parent\nimport sys, time\ntie_to_parent()\nprint(1, flush=True)\n"
    code += "import threading\n[t.join() for t in threading.enumerate() if t.name == 'tie to parent']\nprint('free')"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        child.stdin.write(LET_GO)
        child.stdin.close()
        assert child.stdout.readline() == b"free\n"
        assert child.wait(60) == 0
