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

from spes_p2p.bootstrap.node import BootstrapNode
from spes_p2p.bootstrap.options import DEFAULT_LISTEN, BootstrapOptions
from spes_p2p.errors import EXIT_INTERRUPTED, SpesError
from spes_p2p.storage.places import home

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PROGRAM = "spes-p2p-bootstrap"


def default_data_dir() -> Path:
    """Where a bootstrap node keeps its identity and ports unless told otherwise.

    A folder of its own: a node of a run may live on the same machine.
    """
    return home() / "bootstrap"


def run_bootstrap(
    *,
    data_dir: Path,
    listen: Sequence[str] = (),
    announce: Sequence[str] = (),
    bootstrap: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Run a bootstrap node until SIGINT, SIGTERM or SIGHUP; returns 0, the exit code.

    `bootstrap` are addresses of other bootstrap nodes. First of all it prints the addresses to paste into an invite,
    one a line, or with `as_json` one line `{"addresses": [...], "peer": "..."}`. Raises SpesError.
    """
    options = BootstrapOptions(
        data_dir=data_dir,
        listen=tuple(listen) or DEFAULT_LISTEN,
        announce=tuple(announce),
        peers=tuple(bootstrap),
    )
    options.check()
    asyncio.run(_run(options, as_json))
    return 0


async def _run(options: BootstrapOptions, as_json: bool) -> None:
    told_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, told_to_end.set)
    node = await BootstrapNode.start(options)
    try:
        addresses = await node.addresses()
        peer = addresses[0].rsplit("/", 1)[1]
        print(json.dumps({"addresses": addresses, "peer": peer}) if as_json else "\n".join(addresses), flush=True)
        end, failure = asyncio.create_task(told_to_end.wait()), asyncio.create_task(node.wait_failed())
        await asyncio.wait((end, failure), return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
    finally:
        await node.close()


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
    data_dir: Annotated[Path | None, typer.Option(help="Folder of its identity and ports.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as JSON.")] = False,
) -> None:
    """Introduce peers to each other: a DHT server and relay. Prints its address, and runs until told to end.

    Example: spes-p2p-bootstrap --listen /ip4/0.0.0.0/tcp/31337
    """
    run_bootstrap(
        data_dir=data_dir or default_data_dir(),
        listen=listen or (),
        announce=announce or (),
        bootstrap=bootstrap or (),
        as_json=as_json,
    )


def main() -> None:
    """Entry point: one or two lines and an exit code for what goes wrong."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    sys.exit(run(sys.argv[1:]))


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
