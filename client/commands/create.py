"""`spes-p2p run create`: start a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import Bootstrap, Data, DataDir, Json
from spes_p2p.client.output import say, say_json
from spes_p2p.client.settings import choose, data_paths, from_flags
from spes_p2p.config import RunConfig
from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import ConfigError, UsageError
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import parse_peer_address
from spes_p2p.network.link import format_link


def create(
    config_file: Annotated[Path, typer.Argument(help="The run's configuration, a TOML file.", metavar="RUN.TOML")],
    founder: Annotated[
        list[str] | None,
        typer.Option("--founder", help="Peer id of a further founder; may be repeated.", metavar="PEERID"),
    ] = None,
    bootstrap: Bootstrap = None,
    data: Data = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check the configuration, make the first weights, sign the manifest, and print the invite link.

    This machine's identity becomes a founder. The held-out set is drawn from the text that --data names.

    Example: spes-p2p run create run.toml --founder 12D3KooW... --bootstrap /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    choices = choose(from_flags(data_dir=data_dir, bootstrap=bootstrap, data=data))
    config = RunConfig.from_toml(config_file)
    # numpy comes with it, which the commands that only look do without
    from spes_p2p.training.tokenizer import ByteTokenizer

    if config.model.vocab_size < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"{config_file}: model.vocab_size {config.model.vocab_size}: tokens are bytes, "
            f"so it must be at least {ByteTokenizer.vocab_size}"
        )
    founders = [_founder(text) for text in founder or ()]
    addresses = tuple(parse_peer_address(text).text for text in choices.bootstrap or ())
    folder = choices.data_dir or folders.default_folder()
    if folders.has_run(folder):
        raise UsageError(f"{folder} belongs to a run already\nGive the new run a folder of its own with --data-dir.")
    texts = list(_documents(data_paths(choices.data or ())))
    # genesis weights need torch
    from spes_p2p.node.create import create_run

    link = create_run(config, folder, founders=founders, documents=texts, bootstrap=addresses)
    text = format_link(link)
    folders.remember(folder, text)
    if json:
        say_json({"link": text, "run": link.run.hex(), "data_dir": str(folder.absolute())})
    else:
        say(text)


def _founder(text: str) -> PeerId:
    try:
        return peer_from_text(text)
    except ValueError as error:
        raise UsageError(f"--founder {error}; `spes-p2p identity show` prints it") from error


def _documents(paths: Iterable[Path]) -> Iterator[bytes]:
    from spes_p2p.training.documents import default_files, find_files, read_documents

    given = tuple(paths)
    for file in find_files(given) if given else default_files():
        yield from read_documents(file)
