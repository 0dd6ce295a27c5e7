"""`MemoryBlobs`: a blob store in memory, for tests and simulations."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.digests import CHUNK_BYTES, blob_id, blob_id_of_chunks, chunk_digest, chunk_digests, num_chunks
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest


class MemoryBlobs:
    """Satisfies `ports.BlobStore`. A restart of the process is played by keeping the object."""

    def __init__(self) -> None:
        self._whole: dict[Digest, bytes] = {}
        self._lists: dict[Digest, tuple[Digest, ...]] = {}
        self._partial: dict[Digest, dict[int, bytes]] = {}

    def put(self, data: bytes | bytearray | memoryview) -> Digest:
        """Store bytes and return their id."""
        copy = bytes(data)
        blob = blob_id(copy)
        self._add(blob, copy, chunk_digests(copy))
        return blob

    def has(self, blob: Digest) -> bool:
        """Whether the whole blob is here."""
        return blob in self._whole

    def size_bytes(self, blob: Digest) -> int:
        """Size of a blob that is here. Raises BlobError otherwise."""
        return len(self._bytes(blob))

    def chunks(self, blob: Digest) -> tuple[Digest, ...]:
        """Chunk hashes of a blob that is here. Raises BlobError otherwise."""
        self._bytes(blob)
        return self._lists[blob]

    def read(self, blob: Digest, start: int = 0, stop: int | None = None) -> memoryview:
        """Read-only bytes [start, stop) of a blob. Raises BlobError if it is not here or the range is outside it."""
        data = self._bytes(blob)
        end = len(data) if stop is None else stop
        if not 0 <= start <= end <= len(data):
            raise BlobError(f"blob {blob.hex()}: no bytes {start} to {end}, its size is {len(data)}")
        return memoryview(data)[start:end]

    def partial(self, blob: Digest, size_bytes: int, chunks: Sequence[Digest]) -> MemoryPartial:
        """Begin, or resume, the assembly of a blob. Raises BlobError if size and list do not make its id."""
        if len(chunks) != num_chunks(size_bytes) or blob_id_of_chunks(size_bytes, chunks) != blob:
            raise BlobError(f"blob {blob.hex()}: the chunk list does not belong to it")
        return MemoryPartial(self, blob, size_bytes, tuple(chunks))

    def delete(self, blob: Digest) -> None:
        """Forget a blob, and a partial one; no error if it is not here."""
        self._whole.pop(blob, None)
        self._lists.pop(blob, None)
        self._partial.pop(blob, None)

    def ids(self) -> tuple[Digest, ...]:
        """All whole blobs, sorted."""
        return tuple(sorted(self._whole))

    def damage(self, blob: Digest, at: int = 0) -> None:
        """Flip the bits of one byte and keep the id: a store that serves wrong bytes."""
        data = bytearray(self._bytes(blob))
        data[at] ^= 0xFF
        self._whole[blob] = bytes(data)

    def _bytes(self, blob: Digest) -> bytes:
        try:
            return self._whole[blob]
        except KeyError:
            raise BlobError(f"blob {blob.hex()} is not here") from None

    def _add(self, blob: Digest, data: bytes, chunks: tuple[Digest, ...]) -> None:
        self._whole[blob] = data
        self._lists[blob] = chunks
        self._partial.pop(blob, None)


class MemoryPartial:
    """Satisfies `ports.PartialBlob`; made by `MemoryBlobs.partial`."""

    def __init__(self, store: MemoryBlobs, blob: Digest, size_bytes: int, chunks: tuple[Digest, ...]) -> None:
        self._store = store
        self._blob = blob
        self._size_bytes = size_bytes
        self._chunks = chunks
        if not store.has(blob):
            store._partial.setdefault(blob, {})

    def missing(self) -> tuple[int, ...]:
        """Indices of the chunks not yet here, ascending."""
        if self._store.has(self._blob):
            return ()
        here = self._here()
        return tuple(index for index in range(len(self._chunks)) if index not in here)

    def write(self, index: int, chunk: bytes) -> None:
        """Add one chunk. Raises BlobError if its hash is not the listed one."""
        if not 0 <= index < len(self._chunks):
            raise BlobError(f"blob {self._blob.hex()}: no chunk {index}, it has {len(self._chunks)}")
        size_bytes = min(CHUNK_BYTES, self._size_bytes - index * CHUNK_BYTES)
        if len(chunk) != size_bytes or chunk_digest(chunk) != self._chunks[index]:
            raise BlobError(f"blob {self._blob.hex()}: chunk {index} is not the listed one")
        if not self._store.has(self._blob):
            self._here()[index] = bytes(chunk)

    def finish(self) -> None:
        """Make the whole blob visible. Raises BlobError if a chunk is missing."""
        if self._store.has(self._blob):
            return
        if missing := self.missing():
            raise BlobError(f"blob {self._blob.hex()}: {len(missing)} of {len(self._chunks)} chunks are missing")
        here = self._here()
        self._store._add(self._blob, b"".join(here[index] for index in range(len(self._chunks))), self._chunks)

    def _here(self) -> dict[int, bytes]:
        try:
            return self._store._partial[self._blob]
        except KeyError:
            raise BlobError(f"blob {self._blob.hex()} was deleted while it was being fetched") from None
