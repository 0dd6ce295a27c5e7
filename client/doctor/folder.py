"""What lies in a data folder: the key, whoever holds the lock, and whether the files of the run are sound.

Nothing is changed: a damaged file is named and left to its owner, or to the next start of the node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spes_p2p.client import folders
from spes_p2p.client.doctor.finding import Finding, fail, of_error, ok, warn
from spes_p2p.client.output import count_text
from spes_p2p.digests import blob_id_of_chunks
from spes_p2p.errors import BlobError, DataError, LinkError, LocalStateError, MachineError, SpesError, UnreachableError
from spes_p2p.ids import Digest
from spes_p2p.network.link import parse_link
from spes_p2p.node.budgets.store import read_limits, read_month
from spes_p2p.node.control_client import find_control
from spes_p2p.node.files import (
    BLOBS_FOLDER,
    CONTROL_FILE,
    IDENTITY_FILE,
    JOURNAL_FILE,
    LEAVE_FILE,
    LEDGER_FILE,
    LIMITS_FILE,
    MANIFEST_FILE,
    MONTH_FILE,
)
from spes_p2p.node.history import read_manifest
from spes_p2p.storage.identity import load_identity
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.storage.ledger import Ledger
from spes_p2p.storage.lock import lock_holder
from spes_p2p.storage.partial import hash_chunks
from spes_p2p.training.documents import default_files, find_files
from spes_p2p.units import bytes_text

BLOBS_LIMIT_S = 5.0


def key(folder: Path) -> Finding:
    """The identity file: sound, and for this user alone."""
    path = folder / IDENTITY_FILE
    if not os.path.lexists(path):
        return ok("key", f"none yet in {folder}: it is made at the first start")
    try:
        identity = load_identity(path)
        mode = folder.stat().st_mode & 0o777
    except LocalStateError as error:
        return of_error("key", error)
    if mode & 0o022:
        return warn("key", f"others may write into {folder} (mode {mode:03o})", f"Run: chmod 700 {folder}")
    return ok("key", f"{identity.text}, sound and private")


def lock(folder: Path) -> Finding:
    """Whether a process runs with this folder already."""
    try:
        holder = lock_holder(folder)
    except MachineError as error:
        return of_error("lock", error)
    if holder is None:
        return ok("lock", "no node runs with this folder")
    who = f"process {holder}" if holder else "a process"
    return warn("lock", f"{who} runs with this folder", "A second one is turned away: `spes-p2p leave` ends that one.")


def state(folder: Path, *, is_running: bool) -> Iterator[Finding]:
    """The files of the run, those that are there. With a running node the journal is its own to read."""
    checks: list[tuple[str, str, Callable[[Path], str]]] = [
        ("link", folders.LINK_FILE, _link),
        ("run", MANIFEST_FILE, _run),
        ("ledger", LEDGER_FILE, _ledger),
        ("control", CONTROL_FILE, _control),
        ("limits", LIMITS_FILE, _limits),
        ("month", MONTH_FILE, _month),
    ]
    if not is_running:
        checks.append(("journal", JOURNAL_FILE, _journal))
    num_found = 0
    for name, file, check in checks:
        if not (folder / file).exists():
            continue
        num_found += 1
        try:
            yield ok(name, check(folder))
        except LinkError as error:
            yield fail(name, f"{folder / file}: {error}", "Delete it and join with the invite link again.")
        except SpesError as error:
            yield of_error(name, error)
    if (folder / LEAVE_FILE).exists():
        fact = f"{folder / LEAVE_FILE}: a leave was asked for that has not come to its end"
        yield warn("leave", fact, "The next start leaves properly and ends; delete the file to stay.")
    if (folder / BLOBS_FOLDER).is_dir():
        num_found += 1
        yield blobs(folder / BLOBS_FOLDER)
    if not num_found:
        yield ok("state", f"nothing yet in {folder}: it has joined no run")


def _link(folder: Path) -> str:
    text = folders.saved_link(folder)
    if text is None:
        raise LocalStateError(f"{folder / folders.LINK_FILE} is empty\nJoin with the invite link again.")
    return f"run {parse_link(text).run.hex()[:12]}"


def _run(folder: Path) -> str:
    signed = read_manifest(folder)
    founders = len(signed.manifest.founders) if signed is not None else 0
    return f"its manifest is sound, with {count_text(founders, 'founder')}"


def _ledger(folder: Path) -> str:
    ledger = Ledger(folder / LEDGER_FILE)
    try:
        ledger.check()
        latest = ledger.latest()
    finally:
        ledger.close()
    return f"sound, up to round {latest.round:,}" if latest is not None else "sound, without a certified round"


def _journal(folder: Path) -> str:
    SqliteJournal(folder / JOURNAL_FILE).close()
    return "sound"


def _control(folder: Path) -> str:
    try:
        return f"the local API is at {find_control(folder).url}"
    except UnreachableError:
        return "left behind by a node that was killed; the next start replaces it"


def _limits(folder: Path) -> str:
    limits = read_limits(folder).model_dump(exclude_defaults=True)
    return f"sound, {', '.join(name.replace('_', '-') for name in limits)}" if limits else "sound, none is set"


def _month(folder: Path) -> str:
    count = read_month(folder)
    return f"{bytes_text(count.up_bytes + count.down_bytes)} counted in {count.month}" if count is not None else "sound"


def blobs(folder: Path, limit_s: float = BLOBS_LIMIT_S) -> Finding:
    """Whether blobs match their ids: all of them, or as many as can be read within the limit."""
    began_s = time.monotonic()
    files = sorted(path for path in folder.glob("whole/??/*") if _is_id(path.name))
    damaged, num_read, size_bytes = [], 0, 0
    try:
        for path in files:
            if time.monotonic() - began_s > limit_s:
                break
            num_read += 1
            size_bytes += path.stat().st_size
            if not _is_sound(path):
                damaged.append(path.name)
    except OSError as error:
        return fail("blobs", f"{folder}: {error.strerror}", "Check the folder's owner, and the disk (dmesg).")
    fact = f"{count_text(len(files), 'blob')}"
    if num_read < len(files):
        fact += f", of which {num_read:,} were read within {limit_s:.0f} s"
    if damaged:
        fact = f"{len(damaged):,} of {fact} damaged, such as {damaged[0][:12]}"
        return warn("blobs", fact, "The next start drops them and fetches what is needed; check the disk (dmesg).")
    return ok("blobs", f"{fact}, sound ({bytes_text(size_bytes)} read)")


def _is_id(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _is_sound(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return blob_id_of_chunks(size, hash_chunks(fd, size)) == Digest(bytes.fromhex(path.name))
    except BlobError:
        return False  # it became shorter while it was read
    finally:
        os.close(fd)


def data(paths: Sequence[Path]) -> Finding:
    """The text that `--data` names, or the default."""
    given = tuple(path.expanduser().absolute() for path in paths)
    try:
        files = find_files(given) if given else default_files()
        size_bytes = sum(file.stat().st_size for file in files)
    except DataError as error:
        return of_error("data", error)
    except OSError as error:
        return fail("data", f"{error.filename}: {error.strerror}", "Check the path and its owner.")
    unreadable = [file for file in files if not os.access(file, os.R_OK)]
    where = "" if given else " of the installed Python (no --data)"
    fact = f"{count_text(len(files), 'file')}{where}, {bytes_text(size_bytes)}"
    if unreadable:
        return fail("data", f"{unreadable[0]}: no permission to read it", f"Run: chmod u+r {unreadable[0]}")
    if not size_bytes:
        return fail("data", f"{fact}: no text at all", "Name text to train on with --data.")
    return ok("data", fact)
