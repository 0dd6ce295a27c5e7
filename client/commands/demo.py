"""`spes-p2p demo`: a whole swarm on this machine."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from spes_p2p.client.output import complain, prepare_json_file, say, write_json
from spes_p2p.errors import UsageError
from spes_p2p.storage.atomic import disk_errors
from spes_p2p.units import bytes_text

MARK = ".spes-p2p-demo"
"""Lies in a folder that the demo may empty."""


def demo(
    peers: Annotated[int, typer.Option("--peers", min=1, max=8, help="Number of peers, all founders.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Rounds to certify; the first is for claims.")] = 8,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of the terminal UI.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file as one JSON object.", metavar="FILE")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep everything in this folder. Default: a temporary one, deleted.", metavar="DIR"),
    ] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Then train one peer alone, for comparison.")] = False,
) -> None:
    """Run a whole swarm on this machine: a bootstrap node and peers that train together on real text.

    Needs nothing but Python and a few minutes. In a terminal, the terminal UI shows one peer; `n` and `b`
    switch to the others.

    Example: spes-p2p demo --peers 4 --rounds 8 --dir ./demo
    """
    prepare_json_file(json)
    folder = _prepare_folder(directory)
    try:
        with disk_errors(folder):
            figures = _run(folder, peers, rounds, headless=headless, baseline=baseline)
        if json is not None:
            write_json(json, figures)
        _say_summary(figures, folder if directory is not None else None, json)
    finally:
        if directory is None:
            shutil.rmtree(folder, ignore_errors=True)


def _prepare_folder(directory: Path | None) -> Path:
    """An empty folder: a temporary one, a new one, or an earlier demo's, emptied. Raises UsageError for any other."""
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="spes-p2p-demo-"))
    folder = directory.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        inside = list(folder.iterdir())
        if inside and not (folder / MARK).exists():
            raise UsageError(f"--dir {directory}: is not empty, and not an earlier demo's folder")
        for path in inside:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (folder / MARK).touch()
    except FileExistsError as error:
        raise UsageError(f"--dir {directory}: is a file, not a folder") from error
    except OSError as error:
        raise UsageError(f"--dir {directory}: {error.strerror}") from error
    return folder


def _run(folder: Path, num_peers: int, num_rounds: int, *, headless: bool, baseline: bool) -> dict[str, Any]:
    from spes_p2p.client.demo.conduct import conduct, conduct_with_ui
    from spes_p2p.client.demo.swarm import Plan

    plan = Plan(folder=folder, num_peers=num_peers, num_rounds=num_rounds)
    stopping = threading.Event()

    def terminated(_signal: int, _frame: FrameType | None) -> None:
        stopping.set()

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        if headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return conduct(plan, complain, stopping, baseline=baseline)
        return conduct_with_ui(plan, stopping, baseline=baseline)
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_summary(figures: dict[str, Any], folder: Path | None, json: Path | None) -> None:
    say(f"rounds certified   {figures['rounds_certified']} ({figures['tentative']} tentative)")
    say(f"held-out loss      {figures['val_loss_first']:.3f} -> {figures['val_loss_last']:.3f} nats per byte")
    if "baseline_loss" in figures:
        say(f"one peer alone     {figures['baseline_loss']:.3f} nats per byte")
    say(f"updates, tokens    {figures['updates_included']}, {figures['tokens_trained']:,}")
    say(f"served             {figures['leaders_used']} leaders, {figures['aggregators_used']} aggregators")
    say(f"merges applied     {figures['merges_applied']}")
    say(f"same bits          {'yes' if figures['psi_digest_equal'] else 'NO'}")
    sent, received = bytes_text(figures["bytes_sent"]), bytes_text(figures["bytes_received"])
    say(f"traffic, all peers {sent} sent, {received} received")
    first_s, total_s = figures["seconds_to_first_certificate"], figures["seconds_total"]
    say(f"time               {first_s:.0f} s to the first certificate, {total_s:.0f} s in all")
    if folder is not None:
        say(f"everything is in   {folder}; try `spes-p2p ledger show --data-dir {folder / 'peer-1'}`")
    if json is not None:
        say(f"figures            {json}")
