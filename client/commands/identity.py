"""`spes-p2p identity`: this machine's peer id, and its key in a backup that a passphrase protects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json
from spes_p2p.client.output import complain, say, say_json
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.crypto import Identity
from spes_p2p.errors import IdentityError, UsageError
from spes_p2p.node.files import IDENTITY_FILE
from spes_p2p.storage.identity import load_identity, load_or_create_identity

PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="Read the passphrase from the first line of this file.", metavar="FILE"),
]

ELSEWHERE = (
    "What this peer has promised is not in a backup: be sure that the old node has ended for good, since two nodes "
    "with one identity count as lying."
)


def show(data_dir: DataDir = None, json: Json = False) -> None:
    """Print this machine's peer id; the identity is created if there is none yet.

    Example: spes-p2p identity show --data-dir ./a
    """
    path = _identity_file(data_dir)
    identity = load_or_create_identity(path)
    if json:
        say_json({"peer": identity.text, "file": str(path.absolute())})
    else:
        say(identity.text)


def backup(
    file: Annotated[Path, typer.Argument(help="Where to write the backup.", metavar="FILE")],
    passphrase_file: PassphraseFile = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it is there.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Write this machine's key into a file that only the passphrase opens. Works beside a running node.

    Example: spes-p2p identity backup peer-key.json --data-dir ./a

    The passphrase is asked for twice, and nobody can recover it. Without the key, this peer's name is lost.
    """
    path = _identity_file(data_dir)
    identity = load_identity(path)
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name a file")
    if not file.parent.is_dir():
        raise UsageError(f"{file.parent}: no such folder")
    there = UsageError(f"{file} is there already\nName another file, or overwrite it with --force.")
    if file.exists() and not force:
        raise there
    # the ciphers are of no use to the other commands
    from spes_p2p.client.passphrase import new_passphrase
    from spes_p2p.storage.atomic import write_file
    from spes_p2p.storage.backup import seal

    sealed = seal(identity, new_passphrase(passphrase_file))
    try:
        write_file(file, sealed, replace=force)
    except FileExistsError as error:
        raise there from error
    if json:
        say_json({"peer": identity.text, "file": str(file.absolute())})
    else:
        say(f"{identity.text} is in {file}; keep it and its passphrase apart")


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `identity backup` wrote.", metavar="FILE")],
    passphrase_file: PassphraseFile = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace another key in the data folder, which is kept beside it.")
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Put the key of a backup into a data folder in which no node runs.

    Example: spes-p2p identity restore peer-key.json --data-dir ./a

    A key that is there already is only replaced with --force. The old machine's node must not run any more.
    """
    data = _read_backup(file)
    path = _identity_file(data_dir)
    from spes_p2p.client.passphrase import old_passphrase
    from spes_p2p.storage.backup import peer_of, unseal
    from spes_p2p.storage.lock import FolderLock

    peer_of(data, str(file))  # what is no backup at all is said before anybody is asked for anything
    identity = unseal(data, old_passphrase(passphrase_file), str(file))
    with FolderLock(path.parent):
        kept = _put(path, identity, force=force)
    if json:
        say_json({"peer": identity.text, "file": str(path.absolute()), "kept": str(kept) if kept else None})
        return
    say(f"{identity.text} is in {path}" + (f"; the file that was there is now {kept}" if kept else ""))
    complain(ELSEWHERE)


def _put(path: Path, identity: Identity, *, force: bool) -> Path | None:
    """Restore unless the same key is there. Raises UsageError for anything else that is there without `force`."""
    from spes_p2p.storage.identity import replace_identity

    if path.exists() and not force:
        try:
            there = load_identity(path)
        except IdentityError as error:
            first = str(error).splitlines()[0]
            raise UsageError(f"{first}\n--force puts the backup in its place, and keeps the file beside it.") from error
        if there.peer_id == identity.peer_id:
            return None
        raise UsageError(f"{path} holds another key\n--force replaces it, and keeps it beside the new one.")
    return replace_identity(path, identity)


def _identity_file(data_dir: Path | None) -> Path:
    choices = choose(from_flags(data_dir=data_dir))
    folder = choices.data_dir or folders.last_folder() or folders.default_folder()
    return folder / IDENTITY_FILE


def _read_backup(file: Path) -> bytes:
    from spes_p2p.storage.backup import MAX_FILE_BYTES

    try:
        with file.open("rb") as source:
            return source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
