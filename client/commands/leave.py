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
from spes_p2p.node.control_client import read_snapshot, request_leave, request_stop, running_pid
from spes_p2p.node.files import LEAVE_FILE
from spes_p2p.node.snapshot import NodeSnapshot

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
    """Say what remains, each time that it changes, until no node runs there any more.

    Raises UnreachableError if the node ended before it had left.
    """
    told = ""
    while True:
        try:
            text = _remains(read_snapshot(folder))
        except UnreachableError as error:
            text = str(error)
            if running_pid(folder) is None:
                break
        if text and text != told:
            told = text
            say(text)
        time.sleep(_LOOK_EVERY_S)
    if (folder / LEAVE_FILE).exists():
        raise UnreachableError("the node ended before it had left; its next start completes the leave")
    say("left the run")


def _remains(snapshot: NodeSnapshot) -> str:
    return leave_text(snapshot.leave) if snapshot.leave is not None else ""
