"""Starting a run: genesis weights, held-out set, the signed manifest, and the invite link."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spes_p2p.config import PROTOCOL_VERSION, RunConfig
from spes_p2p.crypto import Identity
from spes_p2p.errors import UsageError
from spes_p2p.ids import PeerId
from spes_p2p.network.link import InviteLink
from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, MANIFEST_FILE, RECOVERY_FILE
from spes_p2p.protocol.codec import encode, run_id
from spes_p2p.protocol.messages import RunManifest, SignedRun
from spes_p2p.storage.atomic import write_file
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.lock import FolderLock
from spes_p2p.training.genesis import make_genesis
from spes_p2p.training.heldout import draw_held_out, encode_held_out


def create_run(
    config: RunConfig,
    data_dir: Path,
    *,
    founders: Sequence[PeerId] = (),
    documents: Iterable[bytes],
    bootstrap: Sequence[str] = (),
) -> InviteLink:
    """Make a run whose founders are this machine's identity and `founders`, and return its invite link.

    The held-out set is drawn from `documents`. The recovery key and the manifest stay in `data_dir`; the invite key is
    in the link alone. Raises UsageError if the folder has a run already, DataError for too little text, MachineError
    for a full disk; the folder is then as it was.
    """
    held_out = encode_held_out(draw_held_out(documents, config.held_out_bytes, config.seed))
    was_there = data_dir.exists()
    with FolderLock(data_dir), _whole_or_nothing(data_dir, was_there=was_there):
        if (data_dir / MANIFEST_FILE).exists():
            raise UsageError(f"{data_dir} belongs to a run already\nGive the new run a folder of its own: --data-dir.")
        identity = load_or_create_identity(data_dir / IDENTITY_FILE)
        blobs = DiskBlobs(data_dir / BLOBS_FOLDER)
        genesis = make_genesis(config, blobs)
        invite = Identity.generate() if config.protocol.admission == "invited" else None
        recovery = Identity.generate()
        manifest = RunManifest(
            PROTOCOL_VERSION,
            config.to_json(),
            identity.peer_id,
            tuple(sorted({identity.peer_id, *founders})),
            invite.peer_id if invite is not None else b"",
            recovery.peer_id,
            genesis.parts,
            genesis.shards,
            blobs.put(held_out),
            len(held_out),
        )
        signed = SignedRun(manifest, identity.sign("run", encode(manifest)))
        write_file(data_dir / RECOVERY_FILE, recovery.seed.hex().encode())
        # the last of all: with it the folder belongs to the run
        write_file(data_dir / MANIFEST_FILE, encode(signed))
    return InviteLink(
        run=run_id(manifest),
        bootstrap=tuple(bootstrap),
        invite_seed=invite.seed if invite is not None else None,
    )


@contextmanager
def _whole_or_nothing(data_dir: Path, *, was_there: bool) -> Iterator[None]:
    """If the block fails, take away what it has made: the folder if it was not there, else what is new in it.

    Called with the folder's lock held, whose file stays in a folder that was there.
    """
    before = {path.name for path in data_dir.iterdir()}
    try:
        yield
    except BaseException:
        if not was_there:
            shutil.rmtree(data_dir, ignore_errors=True)
            raise
        for path in data_dir.iterdir():
            if path.name not in before:
                _remove(path)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
