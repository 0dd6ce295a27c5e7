"""`DiskBlobs`: content-addressed bytes in a folder that the node and its trainer share.

    whole/ab/abcd...          a blob, plain bytes, under the hex of its id
    whole/ab/abcd....chunks   its chunk hashes, 32 bytes each: a cache, checked against the id and made again if wrong
    partial/abcd...           a blob that is being fetched
    tmp/                      what is being written
    lock                      held while names change, never while data is written

A blob appears by rename after its bytes are on the medium, and is never changed in place. So a reader's map stays
valid whatever happens to the name, and whoever sees a name sees a whole blob, unless the disk damaged it: size and
chunk list are checked against the id at first use, all bytes by `verify`; what is found damaged is dropped.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.digests import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Bytes,
    blob_id_of_chunks,
    chunk_digest,
    chunk_digests,
    num_chunks,
)
from spes_p2p.errors import BlobError, MachineError
from spes_p2p.ids import Digest
from spes_p2p.storage.atomic import TempFile, disk_errors, fsync_folder, make_folder, remove_leftovers, temp_file
from spes_p2p.storage.lock import exclusive
from spes_p2p.storage.partial import DiskPartial, hash_chunks

_LIST_SUFFIX = ".chunks"
_MAP_FROM_BYTES = 64 * 1024
"""Shorter ranges are copied: a map costs a file descriptor as long as it lives."""
_CACHED_LISTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A blob whose size and chunk list were checked against its id, and the file that was looked at."""

    inode: int
    modified_ns: int
    size_bytes: int
    chunks: tuple[Digest, ...]


class DiskBlobs:
    """Satisfies `ports.BlobStore`. Threads and processes may share the folder.

    Every method that writes raises MachineError when the disk is full or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._root = path
        self._whole = path / "whole"
        self._partial = path / "partial"
        self._tmp = path / "tmp"
        for folder in (self._whole, self._partial, self._tmp):
            make_folder(folder)
        self._known: OrderedDict[Digest, _Known] = OrderedDict()
        self._known_lock = threading.Lock()
        remove_leftovers(self._tmp)

    def put(self, data: bytes | bytearray | memoryview) -> Digest:
        """Store C-contiguous bytes and return their id; durable on return. A damaged copy that is here is replaced."""
        view = memoryview(data).cast("B")
        chunks = chunk_digests(view)
        blob = blob_id_of_chunks(len(view), chunks)
        if self._confirm(blob):
            return blob
        with temp_file(self._tmp) as temp:
            temp.write(view)
            self._publish(temp, blob, chunks)
        return blob

    def put_stream(self, pieces: Iterable[Bytes]) -> Digest:
        """Store the concatenation of `pieces` without holding more than one piece and one chunk in memory."""
        chunks: list[Digest] = []
        size_bytes = 0
        with temp_file(self._tmp) as temp:
            for chunk in _rechunk(pieces):
                temp.write(chunk)
                chunks.append(chunk_digest(chunk))
                size_bytes += len(chunk)
            blob = blob_id_of_chunks(size_bytes, chunks)
            if not self._confirm(blob):
                self._publish(temp, blob, tuple(chunks))
        return blob

    def put_file(self, source: Path) -> Digest:
        """Store a copy of a file. Raises OSError if it cannot be read."""
        with source.open("rb") as file:
            return self.put_stream(iter(lambda: file.read(CHUNK_BYTES), b""))

    def has(self, blob: Digest) -> bool:
        """Whether the whole blob is here."""
        return self._path(blob).is_file()

    def size_bytes(self, blob: Digest) -> int:
        """Size of a blob that is here. Raises BlobError otherwise."""
        with self._opened(blob) as (_, known):
            return known.size_bytes

    def chunks(self, blob: Digest) -> tuple[Digest, ...]:
        """Chunk hashes of a blob that is here. Raises BlobError otherwise."""
        with self._opened(blob) as (_, known):
            return known.chunks

    def read(self, blob: Digest, start: int = 0, stop: int | None = None) -> memoryview:
        """Read-only bytes [start, stop) of a blob; 64 KiB and more are memory-mapped as long as the view lives.

        Raises BlobError if the blob is not here, is truncated, or does not have that range. A flipped byte is found by
        `verify`, not here.
        """
        with self._opened(blob) as (fd, known):
            end = known.size_bytes if stop is None else stop
            if not 0 <= start <= end <= known.size_bytes:
                raise BlobError(f"blob {blob.hex()}: no bytes {start} to {end}, its size is {known.size_bytes}")
            if end - start < _MAP_FROM_BYTES:
                return memoryview(os.pread(fd, end - start, start))
            offset = start - start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(fd, end - offset, access=mmap.ACCESS_READ, offset=offset)
            return memoryview(mapped)[start - offset :]

    def path(self, blob: Digest) -> Path:
        """The file that holds a blob, for readers that open files themselves. It must not be changed.

        Raises BlobError if the blob is not here.
        """
        with self._opened(blob):
            return self._path(blob)

    def partial(self, blob: Digest, size_bytes: int, chunks: Sequence[Digest]) -> DiskPartial:
        """Begin, or resume, the assembly of a blob. Raises BlobError if size and list do not make its id."""
        if len(chunks) != num_chunks(size_bytes) or blob_id_of_chunks(size_bytes, chunks) != blob:
            raise BlobError(f"blob {blob.hex()}: the chunk list does not belong to it")
        listed = tuple(chunks)
        return DiskPartial(
            self._partial / blob.hex(),
            blob,
            size_bytes,
            listed,
            is_whole=lambda: self.has(blob),
            adopt=lambda: self._adopt(blob, listed),
        )

    def partial_ids(self) -> tuple[Digest, ...]:
        """Blobs whose fetching has begun and not ended, sorted."""
        return tuple(sorted(_ids_of(self._partial.iterdir())))

    def delete(self, blob: Digest) -> None:
        """Forget a blob, and a partial one; no error if it is not here. Views of it stay valid."""
        self._forget(blob)
        with disk_errors(self._root), exclusive(self._root / "lock"):
            self._list_path(blob).unlink(missing_ok=True)
            self._path(blob).unlink(missing_ok=True)
            (self._partial / blob.hex()).unlink(missing_ok=True)

    def ids(self) -> tuple[Digest, ...]:
        """All whole blobs, sorted."""
        return tuple(sorted(_ids_of(self._whole.glob("??/*"))))

    def verify(self, blob: Digest) -> bool:
        """Hash all bytes of a blob. False if it is not here or was damaged, in which case it is dropped."""
        try:
            with self._opened(blob) as (fd, known):
                if hash_chunks(fd, known.size_bytes) == known.chunks:
                    return True
                self._drop(blob, os.fstat(fd).st_ino)
        except BlobError:
            pass
        return False

    def usage_bytes(self) -> int:
        """What the store takes on disk: whole blobs and their lists by size, partial ones by allocated blocks."""
        whole = sum(status.st_size for status in _statuses(self._whole.glob("??/*")))
        return whole + sum(512 * status.st_blocks for status in _statuses(self._partial.iterdir()))

    def _path(self, blob: Digest) -> Path:
        name = blob.hex()
        return self._whole / name[:2] / name

    def _list_path(self, blob: Digest) -> Path:
        path = self._path(blob)
        return path.with_name(path.name + _LIST_SUFFIX)

    @contextmanager
    def _opened(self, blob: Digest) -> Iterator[tuple[int, _Known]]:
        """The open file of a blob, its size and list checked. Raises BlobError if it is missing or damaged."""
        try:
            fd = os.open(self._path(blob), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BlobError(f"blob {blob.hex()} is not here") from None
        try:
            with disk_errors(self._root):
                yield fd, self._know(fd, blob)
        finally:
            os.close(fd)

    def _know(self, fd: int, blob: Digest) -> _Known:
        status = os.fstat(fd)
        with self._known_lock:
            known = self._known.get(blob)
            if known is not None and (known.inode, known.modified_ns, known.size_bytes) == (
                status.st_ino,
                status.st_mtime_ns,
                status.st_size,
            ):
                self._known.move_to_end(blob)
                return known
        chunks = self._read_list(blob, status.st_size)
        if chunks is None:
            chunks = hash_chunks(fd, status.st_size)
            if blob_id_of_chunks(status.st_size, chunks) != blob:
                self._drop(blob, status.st_ino)
                raise BlobError(f"blob {blob.hex()} was damaged on disk and has been dropped")
            self._write_list(blob, chunks)
        known = _Known(inode=status.st_ino, modified_ns=status.st_mtime_ns, size_bytes=status.st_size, chunks=chunks)
        with self._known_lock:
            self._known[blob] = known
            while len(self._known) > _CACHED_LISTS:
                self._known.popitem(last=False)
        return known

    def _read_list(self, blob: Digest, size_bytes: int) -> tuple[Digest, ...] | None:
        try:
            raw = self._list_path(blob).read_bytes()
        except FileNotFoundError:
            return None
        chunks = tuple(Digest(raw[at : at + DIGEST_BYTES]) for at in range(0, len(raw), DIGEST_BYTES))
        if len(chunks) != num_chunks(size_bytes) or blob_id_of_chunks(size_bytes, chunks) != blob:
            return None
        return chunks

    def _write_list(self, blob: Digest, chunks: Sequence[Digest]) -> None:
        """Not synced, and not missed on a full disk: a list that is absent or wrong is noticed and made again."""
        with suppress(MachineError), temp_file(self._tmp) as temp:
            temp.write(b"".join(chunks))
            with exclusive(self._root / "lock"):
                if self.has(blob):
                    temp.rename(self._list_path(blob))

    def _confirm(self, blob: Digest) -> bool:
        """Whether a sound copy is here and durable."""
        if not self.has(blob) or not self.verify(blob):
            return False
        # whoever renamed it, perhaps another process, may not have come to this yet
        fsync_folder(self._path(blob).parent)
        return True

    def _publish(self, temp: TempFile, blob: Digest, chunks: tuple[Digest, ...]) -> None:
        temp.sync()
        self._give_name(temp.path, blob, chunks)

    def _adopt(self, blob: Digest, chunks: tuple[Digest, ...]) -> None:
        self._give_name(self._partial / blob.hex(), blob, chunks)

    def _give_name(self, source: Path, blob: Digest, chunks: tuple[Digest, ...]) -> None:
        target = self._path(blob)
        self._forget(blob)
        with disk_errors(self._root):
            with exclusive(self._root / "lock"):
                make_folder(target.parent)
                try:
                    source.rename(target)
                except FileNotFoundError:
                    # while a fetch ended, the same blob was put, or it was deleted
                    if not self.has(blob):
                        raise BlobError(f"blob {blob.hex()} was deleted while it was being fetched") from None
                (self._partial / blob.hex()).unlink(missing_ok=True)
            fsync_folder(target.parent)
        self._write_list(blob, chunks)

    def _drop(self, blob: Digest, inode: int) -> None:
        """Remove a damaged file, unless a sound one has taken its name meanwhile."""
        self._forget(blob)
        path = self._path(blob)
        with disk_errors(self._root), exclusive(self._root / "lock"):
            try:
                if path.stat().st_ino != inode:
                    return
            except FileNotFoundError:
                return
            self._list_path(blob).unlink(missing_ok=True)
            path.unlink()

    def _forget(self, blob: Digest) -> None:
        with self._known_lock:
            self._known.pop(blob, None)


def _statuses(files: Iterable[Path]) -> Iterator[os.stat_result]:
    for file in files:
        with suppress(FileNotFoundError):  # another process may delete or rename it
            yield file.stat()


def _ids_of(files: Iterable[Path]) -> Iterator[Digest]:
    for file in files:
        try:
            raw = bytes.fromhex(file.name)
        except ValueError:
            continue
        if len(raw) == DIGEST_BYTES:
            yield Digest(raw)


def _rechunk(pieces: Iterable[Bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of one chunk, the last one shorter."""
    pending = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(view):
            taken = view[: CHUNK_BYTES - len(pending)]
            pending += taken
            view = view[len(taken) :]
            if len(pending) == CHUNK_BYTES:
                yield bytes(pending)
                pending.clear()
    if pending:
        yield bytes(pending)
