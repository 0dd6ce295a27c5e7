"""Ctrl-C once leaves properly, twice ends now; a process that is tied to its parent ends with it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from spes_p2p.client.foreground import Interrupts
from spes_p2p.testing.handle import FakeHandle

TIED = """
import signal, sys
from spes_p2p.client.tie import tie_to_parent
tie_to_parent()
print("ready", flush=True)
signal.pause()
"""


async def wait_for_ever() -> int:
    await asyncio.Event().wait()
    return 0


async def test_first_interrupt_leaves_second_ends(capsys: pytest.CaptureFixture[str]) -> None:
    handle = FakeHandle()
    running = asyncio.create_task(wait_for_ever())
    interrupts = Interrupts(running, handle)
    interrupts.leave_or_stop()
    assert handle.asked == ["leave"]
    assert "Ctrl-C again" in capsys.readouterr().err
    interrupts.leave_or_stop()
    assert handle.asked == ["leave", "stop"]
    running.cancel()


async def test_termination_never_waits_for_a_leave() -> None:
    handle = FakeHandle()
    running = asyncio.create_task(wait_for_ever())
    Interrupts(running, handle).stop()
    assert handle.asked == ["stop, leave kept"]
    running.cancel()


async def test_before_the_node_is_up_there_is_nothing_to_leave() -> None:
    running = asyncio.create_task(wait_for_ever())
    Interrupts(running).leave_or_stop()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_tied_process_ends_when_its_input_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", TIED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(60) == -signal.SIGTERM
