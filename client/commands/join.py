"""`spes-p2p join`: take part in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders, launch
from spes_p2p.client.commands.limit_options import (
    Download,
    GpuPower,
    GpuShare,
    HoursOfDay,
    IdleOnly,
    Monthly,
    PauseOnBattery,
    Upload,
)
from spes_p2p.client.commands.memory_options import Compile, FrozenFormat, Memory, Moments
from spes_p2p.client.commands.options import Announce, Bootstrap, Data, DataDir, Listen, LogJson, Run, Tied
from spes_p2p.client.gpu import CPU, choose_devices
from spes_p2p.client.output import complain
from spes_p2p.client.settings import Choices, choose, from_flags, node_config
from spes_p2p.client.tie import tie_to_parent
from spes_p2p.config import NodeConfig
from spes_p2p.errors import LinkError, UsageError
from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address
from spes_p2p.network.link import InviteLink, parse_link


def join(
    link: Annotated[str | None, typer.Argument(help="Invite link of the run.", show_default=False)] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Number of a GPU, several (0,1), or none (CPU). Default: the first one.")
    ] = None,
    data: Data = None,
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    data_dir: DataDir = None,
    run: Run = None,
    capacity: Annotated[int | None, typer.Option("--capacity", help="Most expert shards to own.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads of the trainer. Default: 1.")] = None,
    frozen_format: FrozenFormat = None,
    moments: Moments = None,
    memory: Memory = None,
    compile_: Compile = None,
    upload: Upload = None,
    download: Download = None,
    monthly: Monthly = None,
    hours: HoursOfDay = None,
    idle_only: IdleOnly = None,
    pause_on_battery: PauseOnBattery = None,
    gpu_share: GpuShare = None,
    gpu_power: GpuPower = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Train until this round is certified, then only serve.")
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No terminal UI: log lines instead.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "--background", help="Start in the background; `attach` shows it.")
    ] = False,
    log_json: LogJson = False,
    tied: Tied = False,
) -> int:
    """Take part in a run: get the model, claim expert shards, train, and publish an update every round.

    Without LINK: --run, then SPES_RUN, then the run that this machine joined last. In a terminal it opens the terminal
    UI; elsewhere, or with --headless, it prints log lines. Ctrl-C once leaves properly, twice ends now.

    Example: spes-p2p join LINK --gpu 0 --data ~/texts
    """
    if detach and (log_json or tied):
        raise UsageError("--detach and --log-json: give one of them; a node in the background logs to node.log")
    flags = from_flags(
        data_dir=data_dir,
        run=run,
        gpu=gpu,
        data=data,
        listen=listen,
        announce=announce,
        bootstrap=bootstrap,
        capacity=capacity,
        threads=threads,
        frozen_format=frozen_format,
        moments=moments,
        memory=memory,
        compile=compile_,
        upload=upload,
        download=download,
        monthly=monthly,
        hours=hours,
        idle_only=idle_only,
        pause_on_battery=pause_on_battery,
        gpu_share=gpu_share,
        gpu_power=gpu_power,
        rounds=rounds,
    )
    config, invite = _resolve(link, flags)
    if tied:
        tie_to_parent()
    if detach:
        return launch.run_in_background(config, invite)
    if headless or log_json or not launch.is_terminal():
        return launch.run_headless(config, invite, as_json=log_json)
    return launch.run_with_ui(config, invite)


def _resolve(link: str | None, flags: Choices) -> tuple[NodeConfig, InviteLink]:
    """What to start, from all that was said. Raises UsageError, MachineError."""
    choices = _checked_addresses(choose(flags))
    invite = parse_link(link) if link is not None else find_link(choices)
    if choices.bootstrap:
        # an address given by hand is tried first: it is the newest news
        merged = tuple(dict.fromkeys([*choices.bootstrap, *invite.bootstrap]))
        invite = replace(invite, bootstrap=merged)
    named = choices.data_dir or (_folder_of_link(choices) if link is None else None)
    folder = folders.folder_for(invite.run.hex(), named)
    devices = choose_devices(choices.gpu)
    config = node_config(choices, data_dir=folder.absolute(), devices=devices, invite_seed=invite.invite_seed)
    if not invite.bootstrap and not folders.has_run(folder):
        raise LinkError(
            "the invite link has no bootstrap address, without which nobody can be found: it may have been cut off\n"
            "Ask whoever gave it for the whole link, or name an entry point with --bootstrap."
        )
    if devices == (CPU,) and choices.gpu is None:
        complain("no usable GPU: training on the CPU (--gpu none says so without asking)")
    return config, invite


def find_link(choices: Choices) -> InviteLink:
    """Without a link as argument: that of --run or SPES_RUN, or of the run joined last. Raises UsageError."""
    folder = _folder_of_link(choices)
    if folder is None:
        return parse_link(choices.run or "")
    saved = folders.saved_link(folder)
    if saved is None:
        raise UsageError("no run to join: give the invite link, such as `spes-p2p join spes-p2p:...`")
    try:
        return parse_link(saved)
    except LinkError as error:
        raise LinkError(f"{folder / folders.LINK_FILE}: {error}") from error


def _folder_of_link(choices: Choices) -> Path | None:
    """The folder whose link tells the run when the command line has none; None: `choices.run` is itself a link."""
    if choices.run is not None:
        return folders.find_folder(None, choices.run) if _looks_like_run_id(choices.run) else None
    if choices.data_dir is not None and choices.data_dir.is_dir():
        return choices.data_dir
    return folders.find_folder(None, None)


def _looks_like_run_id(text: str) -> bool:
    return 0 < len(text) <= 64 and set(text) <= set("0123456789abcdef")


def _checked_addresses(choices: Choices) -> Choices:
    """The same with canonical addresses. Raises AddressError that names the token that is wrong."""
    checked: dict[str, tuple[str, ...]] = {}
    if choices.listen:
        checked["listen"] = tuple(map(parse_listen_address, choices.listen))
    if choices.announce:
        checked["announce"] = tuple(map(parse_announce_address, choices.announce))
    if choices.bootstrap:
        checked["bootstrap"] = tuple(parse_peer_address(text).text for text in choices.bootstrap)
    return choices.model_copy(update=checked)
