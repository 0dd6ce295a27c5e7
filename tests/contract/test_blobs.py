"""What every blob store promises: the fake and the one on disk pass the same suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.digests import CHUNK_BYTES, blob_id, chunk_digests
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest
from spes_p2p.ports import BlobStore
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.testing.blobs import MemoryBlobs

Reopen = Callable[[], BlobStore]
"""The store as a process sees it that starts now."""

SMALL = b"expert shard 3"
LARGE = bytes(range(256)) * (5 * CHUNK_BYTES // 512) + b"tail"  # two and a half chunks and a bit
ABSENT = Digest(bytes(32))


@pytest.fixture(params=["memory", "disk"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    if request.param == "disk":
        return lambda: DiskBlobs(tmp_path / "blobs")
    store = MemoryBlobs()
    return lambda: store


@pytest.fixture
def store(reopen: Reopen) -> BlobStore:
    return reopen()


def chunk(data: bytes, index: int) -> bytes:
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@pytest.mark.parametrize("data", [b"", SMALL, b"x" * CHUNK_BYTES, LARGE], ids=["empty", "small", "chunk", "large"])
def test_put_returns_the_id_of_the_bytes_and_read_gives_them_back(store: BlobStore, data: bytes) -> None:
    blob = store.put(data)
    assert blob == blob_id(data)
    assert store.has(blob)
    assert store.size_bytes(blob) == len(data)
    assert store.chunks(blob) == chunk_digests(data)
    assert bytes(store.read(blob)) == data


def test_views_and_bytearrays_of_any_item_size_are_stored_as_their_bytes(store: BlobStore) -> None:
    words = memoryview(bytearray(16)).cast("I")
    words[1] = 7
    assert store.put(words) == blob_id(bytes(words))
    assert store.put(bytearray(b"abc")) == blob_id(b"abc")


def test_a_later_change_of_the_callers_buffer_does_not_reach_the_store(store: BlobStore) -> None:
    buffer = bytearray(LARGE)
    blob = store.put(buffer)
    buffer[0] ^= 0xFF
    assert bytes(store.read(blob)) == LARGE


def test_putting_twice_is_putting_once(store: BlobStore) -> None:
    assert store.put(SMALL) == store.put(SMALL)
    assert list(store.ids()) == [blob_id(SMALL)]


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 0), (0, 10), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (70_001, 300_003), (5, None), (len(LARGE), None)],
)
def test_read_gives_exactly_the_range(store: BlobStore, start: int, stop: int | None) -> None:
    assert bytes(store.read(store.put(LARGE), start, stop)) == LARGE[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, len(SMALL) + 1), (len(SMALL) + 1, None)])
def test_a_range_outside_the_blob_is_refused(store: BlobStore, start: int, stop: int | None) -> None:
    blob = store.put(SMALL)
    with pytest.raises(BlobError):
        store.read(blob, start, stop)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_what_is_read_cannot_be_written_to(store: BlobStore, data: bytes) -> None:
    view = store.read(store.put(data))
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 0


def test_a_view_outlives_the_deletion_of_its_blob(store: BlobStore) -> None:
    blob = store.put(LARGE)
    view = store.read(blob)
    store.delete(blob)
    assert not store.has(blob)
    assert bytes(view) == LARGE


def test_an_absent_blob_is_a_blob_error(store: BlobStore) -> None:
    assert not store.has(ABSENT)
    for ask in (store.size_bytes, store.chunks, store.read):
        with pytest.raises(BlobError, match=ABSENT.hex()):
            ask(ABSENT)
    store.delete(ABSENT)


def test_ids_are_sorted_and_survive_a_restart(reopen: Reopen) -> None:
    blobs = sorted(reopen().put(bytes([n])) for n in range(20))
    assert list(reopen().ids()) == blobs


def test_chunks_in_any_order_make_the_blob_and_only_finish_shows_it(store: BlobStore) -> None:
    blob = blob_id(LARGE)
    partial = store.partial(blob, len(LARGE), chunk_digests(LARGE))
    assert partial.missing() == (0, 1, 2)
    for index, left in ((2, (0, 1)), (0, (1,)), (1, ())):
        partial.write(index, chunk(LARGE, index))
        assert partial.missing() == left
        assert not store.has(blob)
        assert list(store.ids()) == []
    partial.finish()
    assert bytes(store.read(blob)) == LARGE
    assert store.chunks(blob) == chunk_digests(LARGE)


def test_an_empty_blob_is_assembled_from_no_chunk(store: BlobStore) -> None:
    partial = store.partial(blob_id(b""), 0, ())
    assert partial.missing() == ()
    partial.finish()
    assert bytes(store.read(blob_id(b""))) == b""


def test_a_partial_blob_resumes_after_a_restart_at_the_chunk(reopen: Reopen) -> None:
    blob = blob_id(LARGE)
    reopen().partial(blob, len(LARGE), chunk_digests(LARGE)).write(1, chunk(LARGE, 1))
    resumed = reopen().partial(blob, len(LARGE), chunk_digests(LARGE))
    assert resumed.missing() == (0, 2)
    resumed.write(0, chunk(LARGE, 0))
    resumed.write(2, chunk(LARGE, 2))
    resumed.finish()
    assert bytes(reopen().read(blob)) == LARGE


def test_a_chunk_that_is_not_the_listed_one_is_refused_and_changes_nothing(store: BlobStore) -> None:
    partial = store.partial(blob_id(LARGE), len(LARGE), chunk_digests(LARGE))
    for index, wrong in ((0, chunk(LARGE, 2)), (2, chunk(LARGE, 2)[:-1]), (0, b""), (3, b""), (-1, chunk(LARGE, 2))):
        with pytest.raises(BlobError):
            partial.write(index, wrong)
    assert partial.missing() == (0, 1, 2)


def test_a_blob_with_a_missing_chunk_cannot_be_finished(store: BlobStore) -> None:
    partial = store.partial(blob_id(LARGE), len(LARGE), chunk_digests(LARGE))
    partial.write(0, chunk(LARGE, 0))
    with pytest.raises(BlobError, match="2 of 3"):
        partial.finish()
    assert not store.has(blob_id(LARGE))


def test_a_chunk_list_of_another_blob_is_refused(store: BlobStore) -> None:
    listed = chunk_digests(LARGE)
    for size_bytes, chunks in ((len(LARGE) - 1, listed), (len(LARGE), listed[:-1]), (len(LARGE), listed[::-1])):
        with pytest.raises(BlobError):
            store.partial(blob_id(LARGE), size_bytes, chunks)
    assert list(store.ids()) == []


def test_assembling_a_blob_that_is_here_has_nothing_to_do(store: BlobStore) -> None:
    blob = store.put(LARGE)
    partial = store.partial(blob, len(LARGE), chunk_digests(LARGE))
    assert partial.missing() == ()
    partial.write(0, chunk(LARGE, 0))
    partial.finish()
    assert bytes(store.read(blob)) == LARGE


def test_two_assemblies_of_one_blob_do_not_disturb_each_other(store: BlobStore) -> None:
    first, second = (store.partial(blob_id(LARGE), len(LARGE), chunk_digests(LARGE)) for _ in range(2))
    for index in range(3):
        first.write(index, chunk(LARGE, index))
    second.write(0, chunk(LARGE, 0))
    first.finish()
    second.write(1, chunk(LARGE, 1))
    second.finish()
    assert second.missing() == ()
    assert bytes(store.read(blob_id(LARGE))) == LARGE


def test_delete_forgets_a_partial_blob_too(store: BlobStore) -> None:
    blob = blob_id(LARGE)
    partial = store.partial(blob, len(LARGE), chunk_digests(LARGE))
    partial.write(0, chunk(LARGE, 0))
    store.delete(blob)
    with pytest.raises(BlobError):
        partial.write(1, chunk(LARGE, 1))
    with pytest.raises(BlobError):
        partial.finish()
    assert store.partial(blob, len(LARGE), chunk_digests(LARGE)).missing() == (0, 1, 2)
