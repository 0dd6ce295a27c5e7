"""`spes-p2p pause` and `spes-p2p resume`: hold the training of the node on this machine, and let it go on."""

from __future__ import annotations

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Run
from spes_p2p.client.output import say
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.node.control_client import read_snapshot, request_pause, request_resume
from spes_p2p.node.snapshot import NodeSnapshot


def pause(data_dir: DataDir = None, run: Run = None) -> None:
    """Hold training, over restarts too, and say how long the node keeps its shards meanwhile.

    Example: spes-p2p pause --data-dir ./a

    What is being trained ends with its present step and is handed in. The node stays a member, votes and serves; its
    leases last for as long as the run's rules allow. `spes-p2p resume` ends it.
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    request_pause(folder)
    say(f"paused{_until(read_snapshot(folder))}")


def resume(data_dir: DataDir = None, run: Run = None) -> None:
    """Train again after a pause.

    Example: spes-p2p resume --data-dir ./a

    A round that has not begun here, and that nobody else has published for, is trained at once; else the next one.
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    request_resume(folder)
    snapshot = read_snapshot(folder)
    still = ", ".join(snapshot.pause.reasons) if snapshot.pause is not None else ""
    say(f"the pause is over; training is still held: {still}" if still else "training goes on")


def _until(snapshot: NodeSnapshot) -> str:
    view = snapshot.pause
    return f"; {view.reason}" if view is not None and view.reason else ""
