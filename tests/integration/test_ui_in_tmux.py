"""The terminal UI in a real terminal, on a peer of a live swarm of three."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spes_p2p.client.demo.processes import child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.node.budgets.client import read_limits_view
from spes_p2p.node.control_client import find_control
from spes_p2p.testing.live import LISTEN, LiveSwarm, live_swarm, quick_config
from spes_p2p.testing.tmux import Tmux, has_tmux

pytestmark = [
    pytest.mark.live_long,
    pytest.mark.timeout(540),
    pytest.mark.skipif(not has_tmux(), reason="tmux is not installed"),
]

FOUNDERS = ["ada", "ben", "cleo"]
MINE = FOUNDERS[0]
START_S = 180.0
ROUND_S = 90.0
ANSWER_S = 30.0
KEPT = os.environ.get("SPES_KEEP_SCREENS", "")
"""A folder for what the screens showed, to look at."""
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LiveSwarm]:
    """A bootstrap node and two of the three founders."""
    with live_swarm(tmp_path / "swarm", quick_config()) as swarm:
        texts = {name: swarm.folder / "text" / name for name in FOUNDERS}
        deal_texts(list(texts.values()), text_bytes=100_000)
        swarm.start_bootstrap()
        swarm.create_run(FOUNDERS, texts[MINE])
        swarm.texts[MINE] = texts[MINE]
        for name in FOUNDERS[1:]:
            swarm.join(name, texts[name])
        yield swarm


@pytest.fixture
def terminal(swarm: LiveSwarm) -> Iterator[Tmux]:
    """The third joins in a terminal of 80 columns and 24 lines."""
    command = [
        sys.executable, "-m", "spes_p2p.client", "join", swarm.link, "--gpu", "none", "--listen", LISTEN,
        "--data", str(swarm.texts[MINE]), "--data-dir", str(swarm.data_dir(MINE)),
    ]  # fmt: skip
    environment = {**child_environment(swarm.folder), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with tempfile.TemporaryDirectory() as short:
        opened = Tmux(Path(short), command, environment)
        try:
            yield opened
        finally:
            opened.press("C-c", "C-c", "C-c")
            opened.end()


def keep(name: str, screen: str) -> None:
    if KEPT:
        (Path(KEPT) / f"{name}.txt").write_text(screen)


def family(swarm: LiveSwarm) -> list[psutil.Process]:
    process = psutil.Process(find_control(swarm.data_dir(MINE)).pid)
    return [process, *process.children(recursive=True)]


def test_a_session_from_join_to_leave(swarm: LiveSwarm, terminal: Tmux) -> None:
    terminal.wait_text(START_S, "Round", "p pause")
    swarm.wait_round(3, FOUNDERS, START_S)

    # 80x24: everything that matters at one look, and no line is longer than the terminal
    screen = terminal.wait_text(ROUND_S, "mine", "nats/byte", "tokens", "if I leave now", "voter", "certified", "● me")
    keep("overview-80x24", screen)
    assert max(map(len, screen.splitlines())) <= 80
    assert COLOUR.search(terminal.screen(escapes=True))

    terminal.press("5")
    screen = terminal.wait_text(ANSWER_S, "this round", "tcp, direct", " ms ")
    keep("network-80x24", screen)
    terminal.press("6")
    keep("machine-80x24", terminal.wait_text(ANSWER_S, "RAM", "CPU", "cores"))
    terminal.press("4")
    keep("learning-80x24", terminal.wait_text(ANSWER_S, "held-out, nats by round", "accepted"))
    terminal.press("Tab", "Tab", "Tab", "Tab")

    # limits: what this machine cannot do is said at its field; what can be holds at once
    terminal.press("t")
    keep("limits-80x24", terminal.wait_text(ANSWER_S, "Limits of this node", "gpu power", "Enter  change"))
    terminal.press("Up", "200W", "Enter")
    keep("limits-refused-80x24", terminal.wait_text(ANSWER_S, "--gpu-power: this node trains on the CPU"))
    terminal.press("Down", "Up", "off", "Down", "50MB/s", "Enter")
    terminal.wait_text(ANSWER_S, "Limits changed: upload 50MB/s")
    assert read_limits_view(swarm.data_dir(MINE)).figures.upload_bytes_per_s == 50_000_000

    # 140x40: the machine and the log beside it, too
    terminal.resize(140, 40)
    screen = terminal.wait_text(ANSWER_S, "Machine · trains on cpu", "Log", "held-out, nats by round", "RAM")
    keep("overview-140x40", screen)
    assert max(map(len, screen.splitlines())) > 130

    # the mono theme tells the terminal no colour at all
    terminal.press("c", "c", "c", "c")
    terminal.wait_text(ANSWER_S, "Colours: mono")
    terminal.wait(lambda _: not COLOUR.search(terminal.screen(escapes=True)), ANSWER_S, "screen without colours")

    # a node that stands still is told, the UI goes on, and so does the node afterwards
    processes = family(swarm)
    for process in processes:
        process.suspend()
    try:
        screen = terminal.wait_text(ANSWER_S, "no answer since", "(10 s)")
        keep("frozen-140x40", screen)
        terminal.press("2")
        terminal.wait(lambda screen: "Experts ·" not in screen, ANSWER_S, "view of the round alone")
    finally:
        for process in reversed(processes):
            process.resume()
    terminal.wait(lambda screen: "no answer since" not in screen, ANSWER_S, "answer")

    # a pause says what it costs, and ends
    terminal.press("p")
    keep("paused-140x40", terminal.wait_text(ANSWER_S, "paused for", "you paused it", "p resume"))
    terminal.press("p")
    terminal.wait_text(ANSWER_S, "p pause")

    # a proper leave asks, says what remains, and the UI ends with the node
    terminal.press("l")
    terminal.wait_text(ANSWER_S, "Leave the run properly?", "if I leave now")
    terminal.press("l")
    screen = terminal.wait(lambda screen: "leaving:" in screen or "left the run" in screen, ANSWER_S, "leave")
    keep("leaving-140x40", screen)
    terminal.wait_text(ROUND_S, "left the run", "ended with 0")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
