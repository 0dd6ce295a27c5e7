"""The limits that a volunteer may set, as options: of `join`, and of `limits` on a running node."""

from __future__ import annotations

from typing import Annotated

import typer

Upload = Annotated[str | None, typer.Option("--upload", help="Most to send, such as 1MB/s, or off.", metavar="RATE")]
Download = Annotated[
    str | None, typer.Option("--download", help="Most to receive, such as 4MB/s, or off.", metavar="RATE")
]
Monthly = Annotated[
    str | None,
    typer.Option("--monthly", help="Most bytes a calendar month, both ways, such as 100GB, or off.", metavar="SIZE"),
]
HoursOfDay = Annotated[
    str | None,
    typer.Option(
        "--hours", help="Train at these hours alone, local time, such as 22:00-07:00, or off.", metavar="HOURS"
    ),
]
IdleOnly = Annotated[
    bool | None, typer.Option("--idle-only/--no-idle-only", help="Train only while other programs are quiet.")
]
PauseOnBattery = Annotated[
    bool | None, typer.Option("--pause-on-battery/--no-pause-on-battery", help="Train only on mains.")
]
GpuShare = Annotated[
    str | None,
    typer.Option("--gpu-share", help="Share of the time that training takes, such as 50%, or off.", metavar="SHARE"),
]
GpuPower = Annotated[
    str | None, typer.Option("--gpu-power", help="Most power of each GPU, such as 200W, or off.", metavar="WATTS")
]
