"""The identity file: this peer's Ed25519 key in libp2p's encoding, as the daemon reads it.

It is the one thing that cannot be fetched again, so it is created whole, once, under a lock, and never written again;
whatever else is found at its place is reported and left alone. Only the restoring of a backup replaces it, if told to,
and keeps what was there.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from spes_p2p.crypto import Identity
from spes_p2p.errors import IdentityError
from spes_p2p.storage.atomic import disk_errors, make_folder, remove_leftovers, write_file
from spes_p2p.storage.lock import exclusive

_MAX_BYTES = 4096
"""Far above a key's 68 bytes: nothing large is read into memory."""


def load_or_create_identity(path: Path) -> Identity:
    """The key in the file, made at the first start. Several first starts at once get one key.

    The file is 0600, a folder that is made for it 0700. Raises IdentityError as `load_identity` does, MachineError if
    the file cannot be written.
    """
    if not os.path.lexists(path):
        make_folder(path.parent)
        with exclusive(path.with_name(path.name + ".lock")):
            remove_leftovers(path.parent)
            # a program that does not know the lock may still put a key there: that one is kept
            with suppress(FileExistsError):
                write_file(path, Identity.generate().to_libp2p_bytes(), replace=False)
    return load_identity(path)


def load_identity(path: Path) -> Identity:
    """The key in an existing file.

    Raises IdentityError, with path and remedy, if there is no file, if it is something else than a file, if its mode
    keeps its owner out or lets others in, or if its content is not one Ed25519 key.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise IdentityError(f"identity {path} is {what}\nMove it away, or restore the key file from your backup.")
        mode = stat.S_IMODE(status.st_mode)
        if not mode & stat.S_IRUSR:
            raise IdentityError(f"identity {path} cannot be read (mode {mode:03o})\nRun: chmod 600 {path}")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise IdentityError(f"identity {path} is open to other users (mode {mode:03o})\nRun: chmod 600 {path}")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise IdentityError(
            f"identity {path} cannot be read: {error.strerror}\nCheck the path and its owner, or restore your backup."
        ) from error
    try:
        return Identity.from_libp2p_bytes(data)
    except ValueError as error:
        raise IdentityError(
            f"identity {path} is damaged: {_what_is_wrong(data)}\n"
            "Restore it from your backup, or move it away to join as a new peer."
        ) from error


def replace_identity(path: Path, identity: Identity) -> Path | None:
    """Put a restored key in the place of what is there, which is kept beside it: the one way to replace a key.

    The folder's node must not run: the caller holds its lock. Returns where the old file is; None if there was none.
    Raises MachineError if the disk refuses.
    """
    make_folder(path.parent)
    kept: Path | None = None
    with exclusive(path.with_name(path.name + ".lock")), disk_errors(path.parent):
        if os.path.lexists(path):
            numbers = (number for number in count(1) if not os.path.lexists(_old_name(path, number)))
            kept = _old_name(path, next(numbers))
            path.rename(kept)
        write_file(path, identity.to_libp2p_bytes(), replace=False)
    return kept


def _old_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.old-{number}")


def _what_is_wrong(data: bytes) -> str:
    whole_bytes = len(Identity.from_seed(bytes(32)).to_libp2p_bytes())
    if not data:
        return "it is empty"
    if data.lstrip().startswith(b"-----BEGIN"):
        return "it is PEM text, not a key in libp2p's encoding"
    if len(data) < whole_bytes:
        return f"it has {len(data)} bytes instead of {whole_bytes}"
    return "it is not an Ed25519 key in libp2p's encoding"
