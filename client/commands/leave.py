"""`spes-p2p leave`: ask the node on this machine to leave its run properly."""

from __future__ import annotations

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Run
from spes_p2p.client.output import say
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.node.control_client import request_leave


def leave(data_dir: DataDir = None, run: Run = None) -> None:
    """Ask the node on this machine to leave its run properly.

    Example: spes-p2p leave --data-dir ./a
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    request_leave(folder)
    say("leaving: the node hands in its work and ends when the others have taken over; `spes-p2p status` shows how far")
