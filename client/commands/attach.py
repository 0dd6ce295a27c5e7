"""`spes-p2p attach`: the terminal UI of a node that runs already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Run
from spes_p2p.client.launch import is_terminal
from spes_p2p.client.output import say
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.errors import UsageError
from spes_p2p.node.control_client import find_control, running_pid


def attach(
    data_dir: DataDir = None,
    run: Run = None,
    web: Annotated[bool, typer.Option("--web", help="In a browser: prints the address to open.")] = False,
    host: Annotated[str, typer.Option("--host", help="Loopback address that --web listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port that --web listens on. Default: a free one.")] = 0,
) -> None:
    """Open the terminal UI of a node that runs in the background, or in another terminal.

    Example: spes-p2p attach --data-dir ./a

    Closing it, by Ctrl-C too, never ends the node; `l` has it leave properly.
    """
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    pid = find_control(folder).pid
    if web:
        from spes_p2p.client.web import serve_web

        serve_web(folder, host, port)
        return
    if not is_terminal():
        raise UsageError("attach needs a terminal; `spes-p2p status` prints what the node is doing")
    _show(folder)
    say(f"the node goes on (process {pid})" if running_pid(folder) == pid else "the node has ended")


def _show(folder: Path) -> None:
    from spes_p2p.client.ui.app import SwarmApp
    from spes_p2p.client.ui.feed import ControlFeed

    SwarmApp([ControlFeed(folder)], role="attached").run()
