"""A node with and without a terminal: in the background, attached to, detached from, and after the terminal is gone."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from spes_p2p.client.demo.processes import child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.node.control_client import running_pid
from spes_p2p.node.files import LEAVE_FILE, LOG_FILE
from spes_p2p.testing.live import LISTEN, LiveSwarm, live_swarm, quick_config
from spes_p2p.testing.terminal import Terminal

pytestmark = [pytest.mark.live, pytest.mark.timeout(540)]

START_S = 120.0
END_S = 60.0
LEAVE_ALTERNATE_SCREEN = b"\x1b[?1049l"
LEFT_S = 3.0
"""Nothing of a node outlives its end by more than this, on a machine that has a processor for it."""
GONE_S = 60.0
"""On a busy machine an interpreter that has torch takes long to end."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """A bootstrap node."""
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.start_bootstrap()
        yield swarm


class Home:
    """A volunteer's folder, and the run that it alone has founded; no node runs there yet."""

    def __init__(self, swarm: LiveSwarm, name: str) -> None:
        self.swarm = swarm
        self.name = name
        self.folder = swarm.data_dir(name)
        text = swarm.folder / f"{name}-text"
        deal_texts([text], text_bytes=50_000)
        swarm.create_run([name], text)
        self.where = ["--data-dir", str(self.folder)]
        self.join = ["join", swarm.link, "--gpu", "none", "--listen", LISTEN, "--data", str(text), *self.where]
        swarm.texts[name] = text

    def output(self, *command: str) -> str:
        return self.swarm.output(*command, *self.where)

    @contextmanager
    def terminal(self, *arguments: str) -> Iterator[Terminal]:
        opened = Terminal(arguments, child_environment(self.swarm.folder))
        try:
            yield opened
        finally:
            opened.end()

    def running_pid(self) -> int | None:
        return running_pid(self.folder)

    def wait_node(self) -> list[psutil.Process]:
        """The processes of the node, once its local API answers."""
        self.swarm.wait(lambda: self.running_pid() is not None, START_S, "node")
        return self.family()

    def family(self) -> list[psutil.Process]:
        pid = self.running_pid()
        assert pid is not None
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]

    def wait_round(self, number: int) -> list[psutil.Process]:
        """The processes of the node, once it has certified that round."""
        self.swarm.wait_round(number, [self.name], START_S)
        return self.family()

    def end(self) -> None:
        """Whatever happened, nothing is left for the next test."""
        if self.running_pid() is None:
            return
        with suppress(psutil.NoSuchProcess):
            processes = self.family()
            for process in processes:
                process.resume()
            processes[0].terminate()
            psutil.wait_procs(processes, timeout=END_S)


@pytest.fixture
def home(swarm: LiveSwarm) -> Iterator[Home]:
    made = Home(swarm, f"ada{len(list(swarm.folder.glob('ada*-text')))}")
    yield made
    made.end()


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert alive == []


def test_node_in_the_background_is_looked_at_paused_frozen_and_left(home: Home) -> None:
    assert "goes on in the background" in home.output(*home.join, "--detach")
    pid = home.running_pid()
    home.wait_round(2)

    # attach from another process; closing it, by Ctrl-C too, ends nothing
    for keys in ("\x03", "d"):
        with home.terminal("attach", *home.where) as attached:
            attached.wait_text("Experts", END_S)
            attached.press(keys)
            assert attached.wait_end(END_S) == 0
            assert f"the node goes on (process {pid})" in attached.text
    with home.terminal("attach", *home.where) as attached:
        attached.wait_text("Experts", END_S)
        attached.close()
        attached.wait_end(END_S)
    assert home.running_pid() == pid

    assert "kept" in home.output("pause")
    held = home.swarm.look(home.name)
    assert held is not None and held.paused and held.pause is not None
    assert held.pause.reasons == ("pause",)
    assert "paused" in home.output("status")
    assert home.output("resume") == "training goes on"

    processes = home.family()
    for process in processes:
        process.suspend()
    answer = home.swarm.command("status", *home.where)
    assert (answer.returncode, "suspended" in answer.stderr) == (3, True), answer.stderr
    for process in reversed(processes):
        process.resume()

    told = home.output("leave", "--wait")
    assert "remains: " in told
    assert told.splitlines()[-1] == "left the run"
    wait_gone(processes)


@pytest.mark.live_long
def test_node_that_was_detached_outlives_its_terminal(home: Home) -> None:
    with home.terminal(*home.join) as opened:
        opened.wait_text("Experts", START_S)
        home.wait_node()
        opened.press("d")
        assert opened.wait_end(END_S) == 0
        assert "goes on in the background" in opened.text
    home.wait_round(1)
    processes = home.family()
    assert home.output("leave", "--now").startswith("ending now")
    wait_gone(processes)
    assert "left the run" not in (home.folder / LOG_FILE).read_text()


@pytest.mark.live_long
@pytest.mark.parametrize("headless", [False, True])
def test_nothing_is_left_when_the_terminal_is_closed(home: Home, headless: bool) -> None:
    with home.terminal(*home.join, *["--headless"] * headless) as opened:
        processes = home.wait_node()
        opened.close()
        opened.wait_end(END_S)
        wait_gone(processes)


@pytest.mark.live_long
@pytest.mark.parametrize(("keys", "code"), [("\x03", 0), ("\x03\x03", 130), ("", 130)])
def test_signals_of_a_node_without_a_ui(home: Home, keys: str, code: int) -> None:
    """No keys: SIGTERM."""
    with home.terminal(*home.join, "--headless") as opened:
        processes = home.wait_round(2)
        for key in keys:
            opened.press(key)
            opened.wait_text("leaving properly", END_S)
        if not keys:
            opened.process.terminate()
        assert opened.wait_end(END_S) == code
        assert "Traceback" not in opened.text
        # whether a leave that takes a moment is seen to be safe on its way is chance; that it is done is told
        assert ("left the run" in opened.text) == (keys == "\x03")
        wait_gone(processes)


@pytest.mark.live_long
@pytest.mark.parametrize(("keys", "code"), [("\x03", 0), ("\x03\x03", 130), ("", 130)])
def test_signals_of_a_node_behind_the_ui(home: Home, keys: str, code: int) -> None:
    """No keys: SIGTERM, after which the terminal is as it was."""
    with home.terminal(*home.join) as opened:
        opened.wait_text("Experts", START_S)
        processes = home.wait_round(2)
        if keys:
            opened.press(keys)
        else:
            opened.process.terminate()
        assert opened.wait_end(END_S) == code
        assert LEAVE_ALTERNATE_SCREEN in opened.raw
        assert "Traceback" not in opened.text
        wait_gone(processes)


@pytest.mark.live_long
def test_nothing_is_left_within_three_seconds_and_the_port_serves_the_next_start(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        join = [*home.join, "--headless"]
        join[join.index(LISTEN)] = f"/ip4/127.0.0.1/tcp/{port}"
        answer = home.swarm.command(*join)
        assert (answer.returncode, f"port {port} is in use by another program" in answer.stderr) == (5, True)
    for end in ("SIGTERM", "SIGINT twice", "SIGKILL"):
        with home.terminal(*join) as opened:
            home.wait_node()
            home.swarm.wait(lambda: len(home.family()) == 3, START_S, "node, daemon, trainer")
            processes = home.family()
            ports = listening(processes)
            assert port in ports
            if end == "SIGINT twice":
                opened.process.send_signal(signal.SIGINT)
                opened.wait_text("leaving properly", END_S)
            opened.process.send_signal(signal.Signals[end.split()[0]])
            _, alive = psutil.wait_procs(processes, timeout=LEFT_S)
            assert alive == [], end
            assert listening(psutil.process_iter()).isdisjoint(ports), end


def listening(processes: Iterable[psutil.Process]) -> set[int]:
    """TCP ports at which these processes wait to be called."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {line.laddr.port for line in process.net_connections("tcp") if line.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.live_long
def test_wish_to_leave_survives_a_kill_and_a_second_ctrl_c_takes_it_back(home: Home) -> None:
    wish = home.folder / LEAVE_FILE
    with home.terminal(*home.join, "--headless") as opened:
        home.wait_round(2)
        opened.press("\x03")
        opened.wait_text("leaving properly", END_S)
        opened.press("\x03")
        assert opened.wait_end(END_S) == 130
    assert not wish.exists()
    swarm = home.swarm
    child = swarm.join(home.name, swarm.texts[home.name])
    swarm.wait(lambda: home.running_pid() == child.pid, START_S, "node")
    wish.touch()  # as a node leaves it that was killed between the wish and its end
    swarm.kill(home.name)
    child = swarm.restart(home.name)
    swarm.wait(lambda: child.exit_code() is not None, START_S, "end of the leave")
    assert child.exit_code() == 0
    assert "a leave was asked for before this start" in swarm.said(home.name)
    assert not wish.exists()
