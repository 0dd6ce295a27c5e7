"""The run's recovery key, where the run was created (docs/protocol.md, section 9)."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.crypto import Identity
from spes_p2p.errors import LocalStateError
from spes_p2p.node.files import RECOVERY_FILE
from spes_p2p.protocol.messages import RunManifest


def read_recovery_key(data_dir: Path, manifest: RunManifest) -> Identity | None:
    """The key of a run; None if it is not in this data folder.

    Raises LocalStateError if the file is damaged, cannot be read, or has another run's key.
    """
    path = data_dir / RECOVERY_FILE
    try:
        key = Identity.from_seed(bytes.fromhex(path.read_text().strip()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalStateError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LocalStateError(f"{path} is damaged\nRestore it from your backup, or move it away.") from error
    if key.peer_id != manifest.recovery_key:
        raise LocalStateError(f"{path} is the recovery key of another run\nMove it away, or restore this run's key.")
    return key
