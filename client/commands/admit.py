"""`spes-p2p run admit`: a founder lets one peer into a run with an allowlist."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json, Run
from spes_p2p.client.output import say, say_json
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import UsageError
from spes_p2p.network.link import format_link, parse_link


def admit(
    peer: Annotated[
        str, typer.Argument(help="Peer id of the newcomer: what `identity show` prints.", metavar="PEERID")
    ],
    data_dir: DataDir = None,
    run: Run = None,
    json: Json = False,
) -> None:
    """Sign for one peer, as a founder of a run with an allowlist, and print the invite link that lets it join.

    The link works for that peer alone. Runs that are open, or that admit by invitation, need none.

    Example: spes-p2p run admit 12D3KooW... --data-dir ./a
    """
    try:
        newcomer = peer_from_text(peer)
    except ValueError as error:
        raise UsageError(f"{error}; `spes-p2p identity show` prints it") from error
    choices = choose(from_flags(data_dir=data_dir, run=run))
    folder = folders.find_folder(choices.data_dir, choices.run)
    saved = folders.saved_link(folder)
    # the protocol's parser is of no use to the other commands
    from spes_p2p.config import RunConfig
    from spes_p2p.node.files import IDENTITY_FILE
    from spes_p2p.node.history import read_manifest
    from spes_p2p.protocol.codec import run_id
    from spes_p2p.protocol.roster import invite_payload
    from spes_p2p.storage.identity import load_identity

    signed = read_manifest(folder)
    if signed is None or saved is None:
        raise UsageError(f"{folder} has joined no run\nName a founder's folder with --data-dir.")
    admission = RunConfig.from_json(signed.manifest.config).protocol.admission
    if admission != "allowlist":
        raise UsageError(f"this run has no allowlist, its admission is {admission!r}: its invite link serves everybody")
    founder = load_identity(folder / IDENTITY_FILE)
    if founder.peer_id not in signed.manifest.founders:
        raise UsageError(f"{founder.text} is no founder of this run, and only founders can let a peer in")
    permit = founder.peer_id + founder.sign("allow", invite_payload(run_id(signed.manifest), newcomer))
    link = format_link(replace(parse_link(saved), permit=permit))
    if json:
        say_json({"link": link, "peer": peer})
    else:
        say(link)
