"""A blob that is being fetched: one sparse file, filled chunk by chunk, resumed after a restart.

Which chunks are here is found by hashing the file, not by a list beside it: a list could promise what a power cut
took away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.digests import CHUNK_BYTES, chunk_digest
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest
from spes_p2p.storage.atomic import disk_errors, fsync


def hash_chunks(fd: int, size_bytes: int) -> tuple[Digest, ...]:
    """Hashes of the chunks of an open file of that size; a file that ends early gives other hashes, or fewer."""
    hashes = []
    for at in range(0, size_bytes, CHUNK_BYTES):
        chunk = os.pread(fd, min(CHUNK_BYTES, size_bytes - at), at)
        if not chunk:
            break
        hashes.append(chunk_digest(chunk))
    return tuple(hashes)


class DiskPartial:
    """Satisfies `ports.PartialBlob`; made by `DiskBlobs.partial`. Threads may share it.

    `is_whole` says whether the store has the blob already (another process may have put it), `adopt` moves the finished
    and synced file into the store.
    """

    def __init__(
        self,
        path: Path,
        blob: Digest,
        size_bytes: int,
        chunks: Sequence[Digest],
        *,
        is_whole: Callable[[], bool],
        adopt: Callable[[], None],
    ) -> None:
        self._path = path
        self._blob = blob
        self._size_bytes = size_bytes
        self._chunks = tuple(chunks)
        self._is_whole = is_whole
        self._adopt = adopt
        self._lock = threading.Lock()
        self._missing: set[int] = set()
        if not is_whole():
            with disk_errors(path.parent):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    self._look(fd)
                finally:
                    os.close(fd)

    def missing(self) -> tuple[int, ...]:
        """Indices of the chunks not yet here, ascending."""
        if self._is_whole():
            return ()
        with self._lock:
            return tuple(sorted(self._missing))

    def write(self, index: int, chunk: bytes) -> None:
        """Add one chunk. Raises BlobError if its hash is not the listed one, MachineError when the disk is full."""
        if not 0 <= index < len(self._chunks):
            raise BlobError(f"blob {self._blob.hex()}: no chunk {index}, it has {len(self._chunks)}")
        if len(chunk) != self._length(index) or chunk_digest(chunk) != self._chunks[index]:
            raise BlobError(f"blob {self._blob.hex()}: chunk {index} is not the listed one")
        fd = self._open()
        if fd is None:
            return
        try:
            with disk_errors(self._path.parent):
                rest, at = memoryview(chunk), index * CHUNK_BYTES
                while len(rest):
                    num_written = os.pwrite(fd, rest, at)
                    rest, at = rest[num_written:], at + num_written
        finally:
            os.close(fd)
        with self._lock:
            self._missing.discard(index)

    def finish(self) -> None:
        """Check the file once more, make it durable and visible. Raises BlobError if a chunk is missing."""
        with self._lock:
            fd = self._open()
            if fd is None:
                return
            try:
                with disk_errors(self._path.parent):
                    if not self._missing:
                        self._look(fd)
                    if self._missing:
                        raise BlobError(
                            f"blob {self._blob.hex()}: {len(self._missing)} of {len(self._chunks)} chunks are missing"
                        )
                    fsync(fd)
            finally:
                os.close(fd)
            self._adopt()

    def _length(self, index: int) -> int:
        return min(CHUNK_BYTES, self._size_bytes - index * CHUNK_BYTES)

    def _look(self, fd: int) -> None:
        """Set the file's size and find out which chunks it holds."""
        was_empty = os.fstat(fd).st_size == 0
        os.ftruncate(fd, self._size_bytes)
        if was_empty:
            self._missing = set(range(len(self._chunks)))
            return
        found = hash_chunks(fd, self._size_bytes)
        self._missing = {index for index, expected in enumerate(self._chunks) if found[index] != expected}

    def _open(self) -> int | None:
        """Descriptor of the file, or None if the blob is whole by now. Raises BlobError if it was deleted."""
        if self._is_whole():
            return None
        try:
            return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._is_whole():
                return None
            raise BlobError(f"blob {self._blob.hex()} was deleted while it was being fetched") from None
