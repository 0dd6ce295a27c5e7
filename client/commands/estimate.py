"""`spes-p2p estimate`: what taking part would take, and what it would be worth, before joining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.client.commands.limit_options import Download, GpuShare, Upload
from spes_p2p.client.commands.options import Bootstrap, DataDir, Json, Run
from spes_p2p.client.gpu import check_gpu_text, choose_devices
from spes_p2p.client.links import checked_addresses, find_invite
from spes_p2p.client.output import complain, say, say_json
from spes_p2p.client.settings import choose, from_flags, node_config
from spes_p2p.errors import LinkError, MachineError
from spes_p2p.node.budgets.store import read_limits

if TYPE_CHECKING:
    from spes_p2p.client.estimate.report import Figure


def estimate(
    link: Annotated[str | None, typer.Argument(help="Invite link of the run.", show_default=False)] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Number of a GPU, several (0,1), or none (CPU).")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Most memory to train with, such as 10GB.")] = None,
    capacity: Annotated[int | None, typer.Option("--capacity", help="Most expert shards to own.")] = None,
    upload: Upload = None,
    download: Download = None,
    gpu_share: GpuShare = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads of the trainer. Default: 1.")] = None,
    frozen_format: Annotated[
        str | None, typer.Option("--frozen-format", help="How others' experts are stored: fp32, bf16, int8 or int4.")
    ] = None,
    moments: Annotated[
        str | None, typer.Option("--moments", help="How the optimizer's moments are stored: fp32 or int8.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time some inner steps on this machine.")
    ] = True,
    watch: Annotated[
        int, typer.Option("--watch", min=0, max=3600, help="Watch the run's rounds for so many seconds at most.")
    ] = 30,
    bootstrap: Bootstrap = None,
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> int:
    """Say what taking part in a run needs and gives on this machine, without joining it.

    Example: spes-p2p estimate spes-p2p:... --gpu 0 --upload 1MB/s --gpu-share 50%

    Memory and what fits, traffic a day, rounds an hour, inner steps a second, the chance to be done in time; each with
    how it was obtained: measured now, from certificates, or reckoned. Exit code 5 if a join would refuse: the run
    does not fit into memory, or the line does not keep up. Limits that are not named are those that a join would find.
    """
    flags = from_flags(
        data_dir=data_dir,
        run=run,
        gpu=gpu,
        memory=memory,
        capacity=capacity,
        threads=threads,
        frozen_format=frozen_format,
        moments=moments,
        upload=upload,
        download=download,
        gpu_share=gpu_share,
        bootstrap=bootstrap,
    )
    choices = checked_addresses(choose(flags))
    if choices.gpu is not None:
        check_gpu_text(choices.gpu)
    invite, folder = find_invite(link, choices)
    if not invite.bootstrap:
        raise LinkError("the invite link has no bootstrap address: nobody can be asked about the run\nUse --bootstrap.")
    devices = choose_devices(choices.gpu)
    node = node_config(choices, data_dir=folder.absolute(), devices=devices, invite_seed=invite.invite_seed)
    limits = node.limits if node.limits is not None else read_limits(folder)  # as a join would take them
    # everything that can be wrong with the arguments was checked: now torch and hivemind, which take seconds
    from spes_p2p.client.estimate.gather import Wishes, gather
    from spes_p2p.client.estimate.report import figures

    wishes = Wishes(node=node, measure=measure, watch_s=float(watch), limits=limits)
    facts = gather(invite, wishes, complain)
    found = figures(facts)
    if json:
        say_json(_as_json(facts.config.name, invite.run.hex(), found))
    else:
        for figure in found:
            say(figure.line)
    return MachineError.exit_code if facts.need is None or facts.judged.refusal else 0


def _as_json(name: str, run_id: str, found: list[Figure]) -> dict[str, Any]:
    return {
        "run": name,
        "run_id": run_id,
        "figures": {figure.name: {"values": figure.values, "how": figure.how, "text": figure.text} for figure in found},
    }
