"""`spes-p2p limits`: show and change what the node on this machine may take."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

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
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import say
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.node.budgets.client import change_limits, read_limits_view
from spes_p2p.node.snapshot import LimitsView


def limits(
    upload: Upload = None,
    download: Download = None,
    monthly: Monthly = None,
    hours: HoursOfDay = None,
    idle_only: IdleOnly = None,
    pause_on_battery: PauseOnBattery = None,
    gpu_share: GpuShare = None,
    gpu_power: GpuPower = None,
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> None:
    """Show the limits of the node on this machine, and what is used of them; with options, change them first.

    They hold at once and over restarts. Example: spes-p2p limits --upload 1MB/s --hours 22:00-07:00
    """
    wanted = from_flags(
        upload=upload,
        download=download,
        monthly=monthly,
        hours=hours,
        idle_only=idle_only,
        pause_on_battery=pause_on_battery,
        gpu_share=gpu_share,
        gpu_power=gpu_power,
    )
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    changes = wanted.limit_changes()
    view = change_limits(folder, changes) if changes else read_limits_view(folder)
    if json:
        say(msgspec.json.format(msgspec.json.encode(view)).decode())
        return
    lines = tuple(limit_lines(view))
    for line in lines or ("no limits; set some with such as `spes-p2p limits --upload 1MB/s`",):
        say(line)


def limit_lines(view: LimitsView) -> Iterator[str]:
    """The limits that are set, one a line; none: nothing."""
    for limit in view.limits:
        words = f"{limit.name.replace('_', '-')} {limit.limit}: {limit.used}"
        yield f"limit      {words}; {limit.holds}" if limit.holds else f"limit      {words}"
    if view.note:
        yield f"line       {view.note}"
