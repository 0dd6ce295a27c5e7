"""`spes-p2p bootstrap`, and the entry point `spes-p2p-bootstrap` that does the same without the rest of the product."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p import systemd
from spes_p2p.bootstrap import flags
from spes_p2p.bootstrap.node import BootstrapNode
from spes_p2p.bootstrap.options import BootstrapOptions
from spes_p2p.ending import end_process
from spes_p2p.errors import EXIT_INTERRUPTED, SpesError
from spes_p2p.storage.places import home

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "spes-p2p-bootstrap"

logger = logging.getLogger(__name__)


def default_data_dir() -> Path:
    """Where a bootstrap node keeps its identity and ports unless told otherwise.

    A folder of its own: a node of a run may live on the same machine.
    """
    return home() / "bootstrap"


def run_bootstrap(options: BootstrapOptions, *, as_json: bool = False) -> int:
    """Run a bootstrap node until SIGINT, SIGTERM or SIGHUP; returns the exit code: 0, or 130 if its start was ended.

    First of all it prints its addresses, one a line, and a line to paste into an invite link, with the other bootstrap
    nodes that it was told of; or with `as_json` one line `{"addresses": [...], "peer": "...", "http": "..."}`. Raises
    SpesError.
    """
    if not asyncio.run(_run(options, as_json)):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


async def _run(options: BootstrapOptions, as_json: bool) -> bool:
    """Returns whether it came so far as to listen before it was told to end."""
    told_to_end = asyncio.Event()
    starting = asyncio.create_task(BootstrapNode.start(options), name="start")

    def tell_to_end() -> None:
        if not told_to_end.is_set():  # a second signal does not disturb the tidying up
            told_to_end.set()
            starting.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, tell_to_end)
    try:
        node = await starting
    except asyncio.CancelledError:
        return False
    try:
        addresses = await node.addresses()
        if as_json:
            peer = addresses[0].rsplit("/", 1)[1]
            print(json.dumps({"addresses": addresses, "peer": peer, "http": node.http_url}), flush=True)
        else:
            print("\n".join((*addresses, invite_line((*addresses, *options.peers)))), flush=True)
        if node.http_url is not None:
            logger.info("health and metrics: %s/health, %s/metrics", node.http_url, node.http_url)
        async with systemd.notifying():
            end, failure = asyncio.create_task(told_to_end.wait()), asyncio.create_task(node.wait_failed())
            await asyncio.wait((end, failure), return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            failure.cancel()
            await asyncio.gather(failure, return_exceptions=True)
        return True
    finally:
        await node.close()


def invite_line(addresses: Sequence[str]) -> str:
    """What to append to an invite link so that it leads here too."""
    return "append to an invite link: " + "".join(f",bootstrap={address}" for address in dict.fromkeys(addresses))


@app.command()
def command(
    listen: Annotated[
        list[str] | None, typer.Option(help="Address to listen on, such as /ip4/0.0.0.0/tcp/31337. Repeatable.")
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Address that others shall dial, such as /dns4/host/tcp/31337. Repeatable.")
    ] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option("--bootstrap", help="Address of another bootstrap node. Repeatable.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of its identity, ports and cache.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as JSON.")] = False,
    metrics: flags.Metrics = flags.DEFAULT_METRICS_FLAG,
    mirror: flags.Mirror = None,
    cache: flags.Cache = None,
    peer_requests: flags.PeerRequests = flags.DEFAULT_REQUESTS,
    peer_rate: flags.PeerRate = None,
    all_requests: flags.AllRequests = flags.DEFAULT_ALL_REQUESTS,
    all_rate: flags.AllRate = None,
    log_file: flags.LogFilePath = None,
    log_size: flags.LogSize = None,
    log_keep: flags.LogKeep = flags.DEFAULT_LOG_KEEP,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON objects.")] = False,
) -> int:
    """Introduce peers to each other: a DHT server and relay. Prints its addresses, and runs until told to end.

    Example: spes-p2p-bootstrap --listen /ip4/0.0.0.0/tcp/31337 --announce /dns4/boot.example.org/tcp/31337
    """
    options = BootstrapOptions(
        data_dir=data_dir or default_data_dir(),
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        peers=tuple(bootstrap or ()),
        metrics=metrics,
        quotas=flags.quota_limits(peer_requests, peer_rate, all_requests, all_rate),
        cache_bytes=flags.cache_bytes(cache),
        mirror_bytes=flags.size_of("--mirror", mirror, 0),
    )
    options.check()
    with flags.logged(flags.log_lines(log_file, log_size, log_keep), as_json=log_json):
        return run_bootstrap(options, as_json=as_json)


def main() -> None:
    """Entry point: one or two lines and an exit code for what goes wrong."""
    end_process(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; what goes wrong becomes one or two lines on standard error."""
    try:
        result = app(arguments, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        print(f"{error.format_message().rstrip('.')}; see `{PROGRAM} --help`", file=sys.stderr)
        return error.exit_code
    except SpesError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        # before it listens; from then on Ctrl-C is its ordinary end
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
