"""`spes-p2p leave`: ask the node on this machine to leave its run properly, or to end now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Run
from spes_p2p.client.output import say
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.client.standing import leave_text
from spes_p2p.errors import UnreachableError, UsageError
from spes_p2p.node.control_client import read_snapshot, request_leave, request_stop

_LOOK_EVERY_S = 0.5


def leave(
    data_dir: DataDir = None,
    run: Run = None,
    now: Annotated[bool, typer.Option("--now", help="End now: the shards wait until the lease lapses.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show what remains until the node has ended.")] = False,
) -> None:
    """Ask the node on this machine to leave its run properly.

    Example: spes-p2p leave --wait

    It finishes the round, hands its shards to those who take over, and ends. A restart does not forget the wish; --now
    takes it back.
    """
    if now and wait:
        raise UsageError("--now and --wait: give one of them; --now waits for nothing")
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    if now:
        request_stop(folder)
        say("ending now: the shards stay this node's until their lease lapses, if it does not come back before")
        return
    request_leave(folder)
    say("leaving: the node hands in its work and ends when the others have taken over; `spes-p2p status` shows how far")
    if wait:
        _show(folder)


def _show(folder: Path) -> None:
    """Say what remains, each time that it changes, until no node runs there any more."""
    told = ""
    while True:
        try:
            snapshot = read_snapshot(folder)
        except UnreachableError:
            say("left the run")
            return
        text = leave_text(snapshot.leave) if snapshot.leave is not None else ""
        if text and text != told:
            told = text
            say(text)
        time.sleep(_LOOK_EVERY_S)
