"""`spes-p2p join`: take part in a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
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
from spes_p2p.client.commands.options import Announce, Bootstrap, Data, DataDir, Listen, LogJson, Run, Tied
from spes_p2p.client.gpu import CPU, choose_devices
from spes_p2p.client.output import complain
from spes_p2p.client.settings import Choices, choose, from_flags, node_config
from spes_p2p.client.tie import tie_to_parent
from spes_p2p.config import NodeConfig
from spes_p2p.errors import EXIT_INTERRUPTED, LinkError, UsageError
from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address
from spes_p2p.network.link import InviteLink, format_link, parse_link

EXIT_KILLED = 1


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
    frozen_format: Annotated[
        str | None, typer.Option("--frozen-format", help="How others' experts are stored: fp32, bf16, int8 or int4.")
    ] = None,
    moments: Annotated[
        str | None, typer.Option("--moments", help="How the optimizer's moments are stored: fp32 or int8.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Most memory to train with, such as 10GB: the GPU's, else RAM.")
    ] = None,
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the attention layers (GPU only).")
    ] = None,
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
    log_json: LogJson = False,
    tied: Tied = False,
) -> int:
    """Take part in a run: get the model, claim expert shards, train, and publish an update every round.

    Without LINK: --run, then SPES_RUN, then the run that this machine joined last. In a terminal it opens the terminal
    UI; elsewhere, or with --headless, it prints log lines. Ctrl-C once leaves properly, twice ends now.
    """
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
    if tied:
        tie_to_parent()
    return _join(link, choose(flags), headless=headless, log_json=log_json)


def _join(link: str | None, chosen: Choices, *, headless: bool, log_json: bool) -> int:
    """The same with the choices of all places."""
    choices = _checked_addresses(chosen)
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
    if headless or log_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _run_headless(config, invite, as_json=log_json)
    return _run_with_ui(config, invite)


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


def _run_headless(config: NodeConfig, invite: InviteLink, *, as_json: bool) -> int:
    from spes_p2p.client.foreground import run_in_foreground
    from spes_p2p.client.logs import set_up

    return run_in_foreground(config, invite, set_up(as_json=as_json))


def _run_with_ui(config: NodeConfig, invite: InviteLink) -> int:
    from spes_p2p.client.node_process import NodeProcess
    from spes_p2p.client.ui.app import SwarmApp
    from spes_p2p.client.ui.feed import ControlFeed
    from spes_p2p.node.files import LOG_FILE
    from spes_p2p.storage.atomic import make_folder

    make_folder(config.data_dir)
    log_file: Path = config.data_dir / LOG_FILE
    process = NodeProcess(config, format_link(invite), log_file)
    try:
        SwarmApp([ControlFeed(config.data_dir, pid=process.pid, exit_code=process.exit_code)]).run()
    finally:
        if process.exit_code() is None:
            complain("ending the node")
        exit_code = process.close()
    if exit_code not in (0, EXIT_INTERRUPTED):
        complain(process.last_words())
        complain(f"(all of it: {log_file})")
    elif exit_code == 0:
        complain("left the run")
    # a signal's number is no exit code of ours
    return exit_code if exit_code >= 0 else EXIT_KILLED
