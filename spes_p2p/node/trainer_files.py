"""The trainer's checkpoints on disk: two generations, each with its own checksum.

A file is 32 bytes of BLAKE3 over the rest, and the rest. A damaged newest generation falls back to the one before.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3

from spes_p2p.digests import DIGEST_BYTES, Bytes, hasher
from spes_p2p.errors import LocalStateError
from spes_p2p.storage.atomic import fsync_folder, make_folder, remove_leftovers, temp_file

NUM_GENERATIONS = 2
_TAG = "spes trainer checkpoint"
_PATTERN = "trainer-*.checkpoint"


class CheckpointFiles:
    """The generations in one folder, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        remove_leftovers(folder)
        self._folder = folder

    def save(self, size_bytes: int, pieces: Iterable[Bytes]) -> memoryview:
        """Store a new generation durably, then delete what is older than the one before. Returns its state, mapped: it
        stays readable when the file is deleted. Raises MachineError."""
        generations = self._generations()
        number = generations[-1][0] + 1 if generations else 1
        with temp_file(self._folder) as temp:
            temp.write(bytes(DIGEST_BYTES))
            hashing = _begun(size_bytes)
            for piece in pieces:
                hashing.update(piece)
                temp.write(piece)
                del piece  # before the next one is made
            os.pwrite(temp.fd, hashing.digest(), 0)
            temp.sync()
            written = _mapped(temp.fd)
            temp.rename(self._folder / f"trainer-{number:08d}.checkpoint")
            fsync_folder(self._folder)
        for _, path in generations[: -(NUM_GENERATIONS - 1)]:
            path.unlink(missing_ok=True)
        return written[DIGEST_BYTES:]

    def load(self) -> Iterator[tuple[Path, memoryview | LocalStateError]]:
        """Generations from the newest: the state, mapped, or what is wrong with the file."""
        for _, path in reversed(self._generations()):
            try:
                with path.open("rb") as file:
                    data = _mapped(file.fileno())
            except OSError as error:
                yield path, LocalStateError(f"{path}: {error.strerror or error}")
                continue
            state = data[DIGEST_BYTES:]
            if _begun(len(state)).update(state).digest() == data[:DIGEST_BYTES]:
                yield path, state
            else:
                yield path, LocalStateError(f"{path}: damaged")

    def _generations(self) -> list[tuple[int, Path]]:
        """(number, path), oldest first."""
        found = []
        for path in self._folder.glob(_PATTERN):
            number = path.stem.removeprefix("trainer-")
            if number.isdecimal():
                found.append((int(number), path))
        return sorted(found)


def _begun(size_bytes: int) -> blake3.blake3:
    """`digest` of a state, without the state."""
    return hasher(_TAG).update(size_bytes.to_bytes(8, "little"))


def _mapped(fd: int) -> memoryview:
    """All bytes of a file: the kernel reads them when they are looked at, and may forget them again."""
    if not os.fstat(fd).st_size:
        return memoryview(b"")  # nothing cannot be mapped
    return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
