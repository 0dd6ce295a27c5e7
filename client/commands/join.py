"""`spes-p2p join`: take part in a run."""

from __future__ import annotations

from typing import Annotated

import typer

from spes_p2p.bootstrap.flags import DEFAULT_LOG_KEEP, LogFilePath, LogKeep, LogSize, log_lines
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
from spes_p2p.client.links import checked_addresses, find_invite
from spes_p2p.client.output import complain
from spes_p2p.client.settings import Choices, choose, from_flags, node_config
from spes_p2p.client.tie import tie_to_parent
from spes_p2p.config import NodeConfig
from spes_p2p.errors import LinkError, UsageError
from spes_p2p.network.link import InviteLink
from spes_p2p.storage.logfile import LogFile


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
    log_file: LogFilePath = None,
    log_size: LogSize = None,
    log_keep: LogKeep = DEFAULT_LOG_KEEP,
    tied: Tied = False,
) -> int:
    """Take part in a run: get the model, claim expert shards, train, and publish an update every round.

    Without LINK: --run, then SPES_RUN, then the run that this machine joined last. In a terminal it opens the terminal
    UI; elsewhere, or with --headless, it prints log lines. Ctrl-C once leaves properly, twice ends now.

    Example: spes-p2p join LINK --gpu 0 --data ~/texts
    """
    given = from_flags(
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
    lines_to = log_lines(log_file, log_size, log_keep)
    headless = headless or log_json or lines_to is not None or not launch.is_terminal()
    return _run(link, given, detach=detach, headless=headless, log_json=log_json, lines_to=lines_to, tied=tied)


def _run(
    link: str | None,
    given: Choices,
    *,
    detach: bool,
    headless: bool,
    log_json: bool,
    lines_to: LogFile | None,
    tied: bool,
) -> int:
    """The node, in one of three ways. Returns the exit code."""
    if detach and (log_json or tied or lines_to is not None):
        what = "--log-json" if log_json else "--log-file" if lines_to is not None else "--tied"
        raise UsageError(f"--detach and {what}: give one of them; a node in the background logs to node.log")
    config, invite = _resolve(link, given)
    if tied:
        tie_to_parent()
    if detach:
        return launch.run_in_background(config, invite)
    if headless:
        return launch.run_headless(config, invite, as_json=log_json, file=lines_to)
    return launch.run_with_ui(config, invite)


def _resolve(link: str | None, flags: Choices) -> tuple[NodeConfig, InviteLink]:
    """What to start, from all that was said. Raises UsageError, MachineError."""
    choices = checked_addresses(choose(flags))
    invite, folder = find_invite(link, choices)
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
