"""Domain-separated BLAKE3: hashes of protocol objects and ids of blobs.

A blob's id is BLAKE3("spes blob", size, hashes of its 1 MiB chunks), so that each chunk of a transfer is checked on its
own once the chunk list has been checked against the id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import blake3

from spes_p2p.ids import Digest

DIGEST_BYTES = 32
CHUNK_BYTES = 1 << 20

Bytes = bytes | bytearray | memoryview


def digest(tag: str, *fields: Bytes | int) -> Digest:
    """Hash of a tag and fields, each with its length in front, so that no two lists of fields collide.

    Integers count as 8 bytes, little-endian, unsigned. Raises OverflowError for an integer outside that.
    """
    return Digest(hasher(tag, *fields).digest())


def hasher(tag: str, *fields: Bytes | int) -> blake3.blake3:
    """`digest` of all fields but the last, for many digests that differ in the last one only."""
    whole: list[Bytes] = []
    for field in (tag.encode(), *fields):
        data = field.to_bytes(8, "little") if isinstance(field, int) else field
        whole += (len(data).to_bytes(8, "little"), data)
    return blake3.blake3(b"".join(whole))


def digest_of_rest(begun: blake3.blake3, last: bytes) -> Digest:
    """The digest of what `hasher` began, with its last field."""
    whole = begun.copy()
    whole.update(len(last).to_bytes(8, "little") + last)
    return Digest(whole.digest())


def chunk_digest(chunk: Bytes) -> Digest:
    """Hash of one chunk of a blob (1 MiB, the last one shorter)."""
    begun = hasher("spes chunk")
    begun.update(memoryview(chunk).nbytes.to_bytes(8, "little"))
    begun.update(chunk)
    return Digest(begun.digest())


def chunk_digests(data: Bytes) -> tuple[Digest, ...]:
    """Hashes of all chunks of `data`, in order; empty data has no chunk."""
    view = memoryview(data).cast("B")
    return tuple(chunk_digest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES))


def blob_id_of_chunks(size_bytes: int, chunks: Iterable[Digest]) -> Digest:
    """Id of a blob from its size and the hashes of its chunks."""
    return digest("spes blob", size_bytes, *chunks)


def blob_id(data: Bytes) -> Digest:
    """Id of a blob that is in memory."""
    return blob_id_of_chunks(memoryview(data).nbytes, chunk_digests(data))


def num_chunks(size_bytes: int) -> int:
    """How many chunks a blob of that size has."""
    return -(-size_bytes // CHUNK_BYTES)


def digest_of_list(tag: str, digests: Sequence[Digest]) -> Digest:
    """Hash of a list of digests, in order."""
    return digest(tag, *digests)
