"""A node with and without a terminal: in the background, attached to, detached from, and after the terminal is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from spes_p2p.client.demo.processes import child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.errors import LocalStateError, UnreachableError
from spes_p2p.node.control_client import find_control
from spes_p2p.testing.live import LISTEN, LiveSwarm, live_swarm, quick_config
from spes_p2p.testing.terminal import Terminal

pytestmark = [pytest.mark.live, pytest.mark.timeout(540)]

START_S = 120.0
END_S = 60.0
GONE_S = 60.0
"""On a busy machine an interpreter that has torch takes long to end."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """A bootstrap node and a run with one founder, who does not run yet."""
    folder = tmp_path_factory.mktemp("swarm")
    text = folder / "text"
    deal_texts([text], text_bytes=100_000)
    with live_swarm(folder / "home", quick_config()) as swarm:
        swarm.start_bootstrap()
        swarm.create_run(["ada"], text)
        swarm.texts["ada"] = text
        yield swarm


def join_arguments(swarm: LiveSwarm) -> list[str]:
    where = ["--data-dir", str(swarm.data_dir("ada"))]
    return ["join", swarm.link, "--gpu", "none", "--listen", LISTEN, "--data", str(swarm.texts["ada"]), *where]


@contextmanager
def terminal(swarm: LiveSwarm, *arguments: str) -> Iterator[Terminal]:
    opened = Terminal(arguments, child_environment(swarm.folder))
    try:
        yield opened
    finally:
        opened.end()


def on(swarm: LiveSwarm, *arguments: str) -> tuple[str, ...]:
    return (*arguments, "--data-dir", str(swarm.data_dir("ada")))


def running_pid(swarm: LiveSwarm) -> int | None:
    try:
        return find_control(swarm.data_dir("ada")).pid
    except (UnreachableError, LocalStateError):
        return None


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert alive == []


@contextmanager
def ended_at_last(swarm: LiveSwarm) -> Iterator[None]:
    """Whatever happens, the next test finds no node."""
    try:
        yield
    finally:
        pid = running_pid(swarm)
        if pid is not None:
            with suppress(psutil.NoSuchProcess):
                processes = family(pid)
                for process in processes:
                    process.resume()
                os.kill(pid, signal.SIGTERM)
                psutil.wait_procs(processes, timeout=END_S)


def test_node_in_the_background_is_looked_at_paused_frozen_and_left(swarm: LiveSwarm) -> None:
    with ended_at_last(swarm):
        told = swarm.output(*join_arguments(swarm), "--detach")
        assert "goes on in the background" in told
        pid = running_pid(swarm)
        assert pid is not None
        swarm.wait_round(2, ["ada"], START_S)

        # attach from another process; closing it, by Ctrl-C too, ends nothing
        for keys in ("\x03", "d"):
            with terminal(swarm, *on(swarm, "attach")) as attached:
                attached.wait_text("Experts", END_S)
                attached.press(keys)
                assert attached.wait_end(END_S) == 0
                assert f"the node goes on (process {pid})" in attached.text
        with terminal(swarm, *on(swarm, "attach")) as attached:
            attached.wait_text("Experts", END_S)
            attached.close()
            attached.wait_end(END_S)
        assert running_pid(swarm) == pid

        assert "kept" in swarm.output(*on(swarm, "pause"))
        held = swarm.look("ada")
        assert held is not None and held.paused and held.pause is not None
        assert held.pause.reasons == ("pause",)
        assert "paused" in swarm.output(*on(swarm, "status"))
        assert swarm.output(*on(swarm, "resume")) == "training goes on"

        processes = family(pid)
        for process in processes:
            process.suspend()
        answer = swarm.command(*on(swarm, "status"))
        assert (answer.returncode, "suspended" in answer.stderr) == (3, True), answer.stderr
        for process in reversed(processes):
            process.resume()

        told = swarm.output(*on(swarm, "leave", "--wait"))
        assert "remains: " in told
        assert told.splitlines()[-1] == "left the run"
        wait_gone(processes)


def test_node_that_was_detached_outlives_its_terminal(swarm: LiveSwarm) -> None:
    with ended_at_last(swarm), terminal(swarm, *join_arguments(swarm)) as opened:
        opened.wait_text("Experts", START_S)
        swarm.wait(lambda: running_pid(swarm) is not None, START_S, "node behind the UI")
        opened.press("d")
        assert opened.wait_end(END_S) == 0
        assert "goes on in the background" in opened.text
        opened.close()
        pid = running_pid(swarm)
        assert pid is not None
        processes = family(pid)
        assert swarm.output(*on(swarm, "leave", "--now")).startswith("ending now")
        wait_gone(processes)


@pytest.mark.live_long
@pytest.mark.parametrize("headless", [False, True])
def test_nothing_is_left_when_the_terminal_is_closed(swarm: LiveSwarm, headless: bool) -> None:
    arguments = join_arguments(swarm) + ["--headless"] * headless
    with ended_at_last(swarm), terminal(swarm, *arguments) as opened:
        swarm.wait(lambda: running_pid(swarm) is not None, START_S, "node")
        pid = running_pid(swarm)
        assert pid is not None
        processes = list({*family(pid), *family(opened.process.pid)})
        opened.close()
        opened.wait_end(END_S)
        wait_gone(processes)


@pytest.mark.live_long
@pytest.mark.parametrize(("signals", "code"), [(["INT"], 0), (["INT", "INT"], 130), (["TERM"], 130)])
def test_signals_of_a_node_without_a_ui(swarm: LiveSwarm, signals: list[str], code: int) -> None:
    with ended_at_last(swarm), terminal(swarm, *join_arguments(swarm), "--headless") as opened:
        opened.wait_text("round 2", START_S)
        pid = running_pid(swarm)
        assert pid is not None
        processes = family(pid)
        for name in signals:
            if name == "INT":
                opened.press("\x03")
                opened.wait_text("leaving properly", END_S)
            else:
                os.kill(pid, signal.SIGTERM)
        assert opened.wait_end(END_S) == code
        assert "Traceback" not in opened.text
        wait_gone(processes)


@pytest.mark.live_long
@pytest.mark.parametrize(("keys", "code"), [("\x03", 0), ("\x03\x03", 130)])
def test_ctrl_c_in_the_ui(swarm: LiveSwarm, keys: str, code: int) -> None:
    with ended_at_last(swarm), terminal(swarm, *join_arguments(swarm)) as opened:
        opened.wait_text("Experts", START_S)
        swarm.wait_round(1, ["ada"], START_S)
        pid = running_pid(swarm)
        assert pid is not None
        processes = family(pid)
        opened.press(keys)
        assert opened.wait_end(END_S) == code
        wait_gone(processes)


@pytest.mark.live_long
def test_sigterm_ends_the_ui_and_leaves_the_terminal_as_it_was(swarm: LiveSwarm) -> None:
    with ended_at_last(swarm), terminal(swarm, *join_arguments(swarm)) as opened:
        opened.wait_text("Experts", START_S)
        swarm.wait(lambda: running_pid(swarm) is not None, START_S, "node behind the UI")
        pid = running_pid(swarm)
        assert pid is not None
        processes = family(pid)
        opened.process.terminate()
        assert opened.wait_end(END_S) == 130
        assert opened.raw.rstrip().endswith(b"ending the node") and b"\x1b[?1049l" in opened.raw
        wait_gone(processes)


@pytest.mark.live_long
def test_wish_to_leave_survives_a_kill_and_a_second_ctrl_c_takes_it_back(swarm: LiveSwarm) -> None:
    wish = swarm.data_dir("ada") / "leave.wanted"
    with ended_at_last(swarm):
        with terminal(swarm, *join_arguments(swarm), "--headless") as opened:
            opened.wait_text("round 2", START_S)
            opened.press("\x03\x03")
            assert opened.wait_end(END_S) == 130
        assert not wish.exists()
        child = swarm.join("ada", swarm.texts["ada"])
        swarm.wait(lambda: running_pid(swarm) == child.pid, START_S, "node")
        swarm.wait_round(1, ["ada"], START_S)
        wish.touch()  # as a node leaves it that was killed between the wish and its end
        swarm.kill("ada")
        child = swarm.restart("ada")
        swarm.wait(lambda: child.exit_code() is not None, START_S, "end of the leave")
        assert child.exit_code() == 0
        assert "a leave was asked for before this start" in swarm.said("ada")
        assert not wish.exists()
