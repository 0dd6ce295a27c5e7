"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of this node's identity, blobs and ledger.", metavar="DIR")
]
Run = Annotated[
    str | None, typer.Option("--run", help="Invite link or beginning of the run id; default: the last run joined.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        help="Training text: file, folder or glob; may be repeated. Default: the installed Python's own text.",
        metavar="PATH",
    ),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Address of a bootstrap node or member; may be repeated.", metavar="MADDR"),
]
Listen = Annotated[
    list[str] | None,
    typer.Option("--listen", help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001.", metavar="MADDR"),
]
Announce = Annotated[
    list[str] | None,
    typer.Option("--announce", help="Address at which others reach this node from outside.", metavar="MADDR"),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log lines as JSON objects.")]
Tied = Annotated[bool, typer.Option("--tied", hidden=True, help="End when standard input ends.")]
