"""`spes-p2p run recover`: begin a new epoch where too few voters are left to go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Run
from spes_p2p.client.output import count_text, say, short_peer
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.errors import UnreachableError, UsageError
from spes_p2p.node.control_client import read_snapshot, request_recovery
from spes_p2p.node.snapshot import NodeSnapshot

_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.2

DANGER = (
    "A recovery is unsafe under partition: if those that are left out have gone on by themselves, or do so later, "
    "the run splits into two that never become one again. Recover only if you know that they are gone or stopped. "
    "They may join again afterwards."
)


def recover(
    data_dir: DataDir = None,
    run: Run = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: the danger is known.")] = False,
) -> None:
    """Go on without the voters that do not answer, by the run's recovery key: unsafe under partition.

    Example: spes-p2p run recover --data-dir ./a

    For a run that waits, or goes on tentatively, because too few of its voters answer. The node that runs here must
    hold the recovery key, which is in the data folder where the run was created.
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    snapshot = read_snapshot(folder)
    for line in plan_lines(snapshot, folder):
        say(line)
    if not yes:
        _confirm()
    request_recovery(folder)
    after = _await_epoch(folder, snapshot.epoch)
    members = count_text(len(after.network.peers), "member")
    say(f"epoch {after.epoch} has begun in round {after.certified_round}, with {members}")


def plan_lines(snapshot: NodeSnapshot, folder: Path) -> list[str]:
    """What a recovery would do. Raises UsageError if this node cannot make one, or the run needs none."""
    if not snapshot.holds_recovery_key:
        raise UsageError(
            f"the node in {folder} does not hold the run's recovery key\n"
            "It is recovery.key, in the data folder where the run was created; the node reads it when it starts."
        )
    plan = snapshot.recovery
    if plan is None:
        raise UsageError("this run can go on: a recovery is for one that waits, or goes on tentatively")
    left_out = [view.peer for view in snapshot.network.peers if view.peer not in plan.keeps]
    return [
        f"the last final certificate is of round {snapshot.final_round}"
        + (f"; {snapshot.waiting}" if snapshot.waiting else ""),
        f"stay      {', '.join(map(short_peer, plan.keeps))}",
        f"left out  {', '.join(map(short_peer, left_out)) or 'nobody'}",
        DANGER,
    ]


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to confirm this\nGive --yes if the danger is known.")
    if not typer.confirm("Begin a new epoch?"):
        raise UsageError("not confirmed: nothing was done")


def _await_epoch(folder: Path, epoch: int) -> NodeSnapshot:
    """The node once it is in a later epoch. Raises UnreachableError if that does not come."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        snapshot = read_snapshot(folder)
        if snapshot.epoch > epoch:
            return snapshot
        if time.monotonic() > deadline_s:
            raise UnreachableError("no new epoch has begun: the run may go on again\nThe node's log says why.")
        time.sleep(_LOOK_EVERY_S)
