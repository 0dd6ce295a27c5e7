"""However the demo ends, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.live

GONE_S = 15.0


def start(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A demo whose bootstrap node is up, and the processes that it has started so far."""
    command = [sys.executable, "-m", "spes_p2p.client", "demo", "--headless", "--dir", str(folder)]
    environment = os.environ | {"SPES_HOME": str(folder)}
    demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert demo.stderr is not None
    for line in demo.stderr:
        if line.startswith("creating the run"):
            break
    return demo, psutil.Process(demo.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signal_takes_all_processes_along(tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo, children = start(tmp_path / "demo")
    assert any("p2pd" in child.name() for child in children)
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert alive == []
