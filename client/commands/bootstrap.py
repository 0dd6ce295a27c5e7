"""`spes-p2p bootstrap`: an entry point that introduces peers to each other."""

from __future__ import annotations

import logging
import sys

from spes_p2p.bootstrap.cli import default_data_dir, run_bootstrap
from spes_p2p.client.commands.options import Announce, Bootstrap, DataDir, Json, Listen, Tied
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.client.tie import tie_to_parent


def bootstrap(
    listen: Listen = None,
    announce: Announce = None,
    bootstrap: Bootstrap = None,
    data_dir: DataDir = None,
    json: Json = False,
    tied: Tied = False,
) -> int:
    """Run a bootstrap node: it introduces peers to each other, relays for those behind routers, and decides nothing.

    The first line it prints is its address, for invite links and --bootstrap. Ctrl-C ends it.

    Example: spes-p2p bootstrap --listen /ip4/0.0.0.0/tcp/31337
    """
    choices = choose(from_flags(data_dir=data_dir, listen=listen, announce=announce, bootstrap=bootstrap))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if tied:
        tie_to_parent()
    return run_bootstrap(
        data_dir=choices.data_dir or default_data_dir(),
        listen=choices.listen or (),
        announce=choices.announce or (),
        bootstrap=choices.bootstrap or (),
        as_json=json,
    )
