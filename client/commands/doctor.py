"""`spes-p2p doctor`: whether this machine can take part, one line per check, each measured now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import Announce, Bootstrap, Data, DataDir, Json, Listen, Run
from spes_p2p.client.gpu import check_gpu_text
from spes_p2p.client.links import checked_addresses, find_invite, has_invite
from spes_p2p.client.output import say, say_json
from spes_p2p.client.settings import Choices, choose, from_flags
from spes_p2p.errors import MachineError
from spes_p2p.network.link import InviteLink

if TYPE_CHECKING:
    from spes_p2p.client.doctor.finding import Finding

EXIT_FAILED = MachineError.exit_code


def doctor(
    link: Annotated[str | None, typer.Argument(help="Invite link of the run.", show_default=False)] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU that shall be used: 0, 0,1 or none.")] = None,
    data: Data = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> int:
    """Check whether this machine can take part: one line per check, each with its remedy. Exit code 5 if one fails.

    Example: spes-p2p doctor spes-p2p:... --data ./text

    With a link, or a run that this machine has joined, it also asks the run's entry points: clock, reachability,
    relay, admission. Give the options that you would give to join. Nothing is changed.
    """
    flags = from_flags(
        data_dir=data_dir, run=run, gpu=gpu, data=data, listen=listen, announce=announce, bootstrap=bootstrap
    )
    choices = checked_addresses(choose(flags))
    invite: InviteLink | None = None
    folder = choices.data_dir or folders.last_folder() or folders.default_folder()
    if link is not None or has_invite(choices):
        invite, folder = find_invite(link, choices)
    if choices.gpu is not None:
        check_gpu_text(choices.gpu)
    from spes_p2p.client.doctor.finding import as_json, line

    found: list[Finding] = []
    for finding in _findings(choices, invite, folder):
        found.append(finding)
        if not json:
            say(line(finding))
    if json:
        say_json(as_json(found))
    return EXIT_FAILED if any(finding.status == "fail" for finding in found) else 0


def _findings(choices: Choices, invite: InviteLink | None, folder: Path) -> Iterator[Finding]:
    """The checks, one after the other, so that each is seen as soon as it is made."""
    from spes_p2p.client.doctor import folder as in_folder
    from spes_p2p.client.doctor import machine, network

    yield machine.python_version()
    yield machine.packages()
    yield machine.daemon()
    yield from machine.disk(folder, 0)
    yield machine.memory()
    yield machine.gpu(choices.gpu)
    yield in_folder.data(choices.data or ())
    yield in_folder.key(folder)
    locked = in_folder.lock(folder)
    yield locked
    is_running = locked.status != "ok"
    yield from in_folder.state(folder, is_running=is_running)
    place = network.Place(
        folder=folder, listen=choices.listen or (), announce=choices.announce or (), is_running=is_running
    )
    port = network.ports(place)
    yield port
    if invite is None or not invite.bootstrap:
        yield from network.without_link()
    else:
        if port.status == "fail":
            place = replace(place, listen=())
        yield from asyncio.run(network.with_link(invite, place))
