"""The trainer's checkpoints on disk: two generations, each with its own checksum.

A file is 32 bytes of BLAKE3 over the rest, and the rest. A damaged newest generation falls back to the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spes_p2p.digests import DIGEST_BYTES, digest
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

    def save(self, state: bytes) -> None:
        """Store a new generation durably, then delete what is older than the one before. Raises MachineError."""
        generations = self._generations()
        number = generations[-1][0] + 1 if generations else 1
        with temp_file(self._folder) as temp:
            temp.write(digest(_TAG, state))
            temp.write(state)
            temp.sync()
            temp.rename(self._folder / f"trainer-{number:08d}.checkpoint")
            fsync_folder(self._folder)
        for _, path in generations[: -(NUM_GENERATIONS - 1)]:
            path.unlink(missing_ok=True)

    def load(self) -> Iterator[tuple[Path, memoryview | LocalStateError]]:
        """Generations from the newest: the state, or what is wrong with the file."""
        for _, path in reversed(self._generations()):
            try:
                data = memoryview(path.read_bytes())
            except OSError as error:
                yield path, LocalStateError(f"{path}: {error.strerror or error}")
                continue
            state = data[DIGEST_BYTES:]
            if digest(_TAG, state) == bytes(data[:DIGEST_BYTES]):
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
