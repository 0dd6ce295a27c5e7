"""What the disk adds to the contract: damage, crashes, full disks, several processes, maps."""

from __future__ import annotations

import errno
import gc
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.digests import CHUNK_BYTES, blob_id, chunk_digests
from spes_p2p.errors import BlobError, MachineError
from spes_p2p.ids import Digest
from spes_p2p.storage.atomic import TEMP_PREFIX
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.partial import hash_chunks

DATA = bytes(range(256)) * (5 * CHUNK_BYTES // 512) + b"tail"
BLOB = blob_id(DATA)
CHUNKS = chunk_digests(DATA)

PUTTER = """
import sys
from pathlib import Path
from spes_p2p.storage.blobs import DiskBlobs
sys.stdin.readline()
store = DiskBlobs(Path(sys.argv[1]))
for number in range(40):
    blob = store.put(bytes([number]) * 70_000)
    assert bytes(store.read(blob)) == bytes([number]) * 70_000
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def store(folder: Path) -> DiskBlobs:
    return DiskBlobs(folder)


def chunk(index: int) -> bytes:
    return DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def truncate(path: Path) -> None:
    os.truncate(path, len(DATA) - 1)


def flip(path: Path, at: int = CHUNK_BYTES + 5) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def list_file(store: DiskBlobs) -> Path:
    path = store.path(BLOB)
    return path.with_name(path.name + ".chunks")


def num_open_files() -> int:
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


def disk_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_files_hold_the_plain_bytes_and_are_private(store: DiskBlobs, folder: Path) -> None:
    store.put(DATA)
    path = store.path(BLOB)
    assert path == folder / "whole" / BLOB.hex()[:2] / BLOB.hex()
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("piece_bytes", [1000, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_a_stream_is_stored_as_its_concatenation_however_it_is_cut(store: DiskBlobs, piece_bytes: int) -> None:
    pieces = (memoryview(DATA)[at : at + piece_bytes] for at in range(0, len(DATA), piece_bytes))
    assert store.put_stream(pieces) == BLOB
    assert store.chunks(BLOB) == CHUNKS
    assert bytes(store.read(BLOB)) == DATA


def test_an_empty_stream_is_the_empty_blob(store: DiskBlobs) -> None:
    assert store.put_stream(iter(())) == blob_id(b"")


def test_a_stream_that_breaks_off_leaves_nothing(store: DiskBlobs) -> None:
    def pieces() -> object:
        yield DATA
        raise BlobError("the source went away")

    with pytest.raises(BlobError, match="went away"):
        store.put_stream(pieces())
    assert store.ids() == ()
    assert store.usage_bytes() == 0


def test_a_file_is_stored_as_a_copy(store: DiskBlobs, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(DATA)
    assert store.put_file(source) == BLOB
    source.write_bytes(b"changed")
    assert bytes(store.read(BLOB)) == DATA


@pytest.mark.parametrize("damage", [truncate, flip])
def test_damage_is_found_by_verify_and_dropped(store: DiskBlobs, damage: Callable[[Path], None]) -> None:
    store.put(DATA)
    assert store.verify(BLOB)
    damage(store.path(BLOB))
    assert not store.verify(BLOB)
    assert not store.has(BLOB)
    assert store.usage_bytes() == 0
    assert store.put(DATA) == BLOB
    assert store.verify(BLOB)


def test_a_truncated_blob_is_never_read_in_part(store: DiskBlobs) -> None:
    store.put(DATA)
    truncate(store.path(BLOB))
    with pytest.raises(BlobError, match="damaged on disk"):
        store.read(BLOB, 0, 10)
    assert not store.has(BLOB)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_putting_the_bytes_again_heals_a_damaged_blob(store: DiskBlobs, damage: Callable[[Path], None]) -> None:
    store.put(DATA)
    damage(store.path(BLOB))
    assert store.put(DATA) == BLOB
    assert store.path(BLOB).read_bytes() == DATA


def test_an_absent_blob_does_not_verify(store: DiskBlobs) -> None:
    assert not store.verify(BLOB)


@pytest.mark.parametrize("content", [None, b"", bytes(96), bytes(33)])
def test_a_chunk_list_that_is_lost_or_wrong_is_made_again(folder: Path, content: bytes | None) -> None:
    store = DiskBlobs(folder)
    store.put(DATA)
    listed = list_file(store)
    if content is None:
        listed.unlink()
    else:
        listed.write_bytes(content)
    assert DiskBlobs(folder).chunks(BLOB) == CHUNKS
    assert listed.read_bytes() == b"".join(CHUNKS)


def test_what_a_crash_left_before_the_rename_is_cleaned_at_the_next_start(store: DiskBlobs, folder: Path) -> None:
    left = folder / "tmp" / f"{TEMP_PREFIX}0011"
    left.write_bytes(DATA)
    assert not store.has(BLOB)
    assert DiskBlobs(folder).ids() == ()
    assert not left.exists()


def test_what_another_process_writes_now_is_not_cleaned(store: DiskBlobs, folder: Path) -> None:
    def pieces() -> object:
        yield DATA[:CHUNK_BYTES]
        DiskBlobs(folder)
        yield DATA[CHUNK_BYTES:]

    assert store.put_stream(pieces()) == BLOB
    assert store.verify(BLOB)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_at_put_leaves_the_store_as_it_was_and_goes_on_when_there_is_room(
    store: DiskBlobs, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    kept = store.put(b"last good state")
    usage_bytes = store.usage_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, disk_full)
        for put in (lambda: store.put(DATA), lambda: store.put_stream([DATA])):
            with pytest.raises(MachineError, match=f"disk full: cannot write in {folder}"):
                put()
    assert store.ids() == (kept,)
    assert store.usage_bytes() == usage_bytes
    assert list((folder / "tmp").iterdir()) == []
    assert store.put(DATA) == BLOB


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_full_disk_in_a_fetch_keeps_the_chunks_that_are_here(
    store: DiskBlobs, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store.partial(BLOB, len(DATA), CHUNKS).write(0, chunk(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, disk_full)
        with pytest.raises(MachineError, match=f"disk full: cannot write in {folder}"):
            store.partial(BLOB, len(DATA), CHUNKS).write(1, chunk(1))
    assert store.partial(BLOB, len(DATA), CHUNKS).missing() == (1, 2)


def test_reading_works_on_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskBlobs(folder)
    store.put(DATA)
    list_file(store).unlink()
    fresh = DiskBlobs(folder)
    monkeypatch.setattr(os, "write", disk_full)
    assert bytes(fresh.read(BLOB)) == DATA


def test_a_chunk_that_rotted_while_the_fetch_was_interrupted_is_missing_again(store: DiskBlobs, folder: Path) -> None:
    partial = store.partial(BLOB, len(DATA), CHUNKS)
    for index in range(3):
        partial.write(index, chunk(index))
    flip(folder / "partial" / BLOB.hex())
    assert store.partial(BLOB, len(DATA), CHUNKS).missing() == (1,)


def test_a_chunk_that_rotted_before_finish_keeps_the_blob_invisible(store: DiskBlobs, folder: Path) -> None:
    partial = store.partial(BLOB, len(DATA), CHUNKS)
    for index in range(3):
        partial.write(index, chunk(index))
    flip(folder / "partial" / BLOB.hex())
    with pytest.raises(BlobError, match="1 of 3"):
        partial.finish()
    assert not store.has(BLOB)
    assert partial.missing() == (1,)
    partial.write(1, chunk(1))
    partial.finish()
    assert store.verify(BLOB)


def test_partial_blobs_are_listed_until_they_are_whole(store: DiskBlobs) -> None:
    partial = store.partial(BLOB, len(DATA), CHUNKS)
    assert store.partial_ids() == (BLOB,)
    for index in range(3):
        partial.write(index, chunk(index))
    partial.finish()
    assert store.partial_ids() == ()


def test_a_put_by_another_process_makes_the_fetch_needless(store: DiskBlobs, folder: Path) -> None:
    partial = store.partial(BLOB, len(DATA), CHUNKS)
    partial.write(0, chunk(0))
    DiskBlobs(folder).put(DATA)
    assert partial.missing() == ()
    partial.write(1, chunk(1))
    partial.finish()
    assert store.verify(BLOB)
    assert store.partial_ids() == ()


def test_two_processes_put_the_same_blobs_at_once(store: DiskBlobs, folder: Path) -> None:
    putters = [
        subprocess.Popen([sys.executable, "-c", PUTTER, str(folder)], stdin=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for putter in putters:
        assert putter.stdin is not None
        putter.stdin.write("go\n")
        putter.stdin.flush()
    for putter in putters:
        putter.communicate()
    assert [putter.returncode for putter in putters] == [0, 0]
    assert store.ids() == tuple(sorted(blob_id(bytes([number]) * 70_000) for number in range(40)))
    assert all(store.verify(blob) for blob in store.ids())
    assert list((folder / "tmp").iterdir()) == []


def test_threads_may_put_read_and_delete_at_once(store: DiskBlobs) -> None:
    failures: list[BaseException] = []

    def work(own: int) -> None:
        try:
            for number in range(20):
                mine = bytes([own, number]) * 40_000
                blob = store.put(mine)
                store.put(DATA)
                if bytes(store.read(blob)) != mine:
                    raise BlobError("read other bytes than were put")
                store.delete(blob)
        except Exception as error:  # handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.ids() == (BLOB,)


def test_a_large_range_is_mapped_and_the_map_ends_with_its_view(store: DiskBlobs) -> None:
    blob = store.put(DATA)
    before = num_open_files()
    views = [store.read(blob) for _ in range(3)]
    assert num_open_files() == before + 3
    assert type(views[0].obj).__name__ == "mmap"
    del views
    assert num_open_files() == before


def test_small_ranges_keep_no_file_open(store: DiskBlobs) -> None:
    blob = store.put(DATA)
    before = num_open_files()
    views = [store.read(blob, at, at + 1000) for at in range(0, 200_000, 1000)]
    assert num_open_files() == before
    assert b"".join(views) == DATA[:200_000]


def test_usage_is_what_blobs_and_lists_take(store: DiskBlobs) -> None:
    store.put(DATA)
    assert store.usage_bytes() == len(DATA) + 32 * len(CHUNKS)
    store.delete(BLOB)
    assert store.usage_bytes() == 0


def test_foreign_files_in_the_folder_are_ignored(store: DiskBlobs, folder: Path) -> None:
    store.put(DATA)
    for name in ("whole/README", f"whole/{BLOB.hex()[:2]}/notes", f"whole/{BLOB.hex()[:2]}/ab"):
        (folder / name).write_bytes(b"")
    assert store.ids() == (BLOB,)


def test_a_blob_is_hashed_once_without_its_list_and_not_again_until_the_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_bytes: list[int] = []

    def counting(fd: int, size_bytes: int) -> tuple[Digest, ...]:
        hashed_bytes.append(size_bytes)
        return hash_chunks(fd, size_bytes)

    store = DiskBlobs(folder)
    store.put(DATA)
    path, listed = store.path(BLOB), list_file(store)
    monkeypatch.setattr("spes_p2p.storage.blobs.hash_chunks", counting)
    listed.unlink()
    assert store.chunks(BLOB) == CHUNKS
    assert hashed_bytes == []
    os.utime(path, ns=(1, 1))
    assert (store.chunks(BLOB), store.chunks(BLOB)) == (CHUNKS, CHUNKS)
    assert hashed_bytes == [len(DATA)]


def finishing(
    folder: Path, data: bytes, at_the_last_moment: Callable[[DiskBlobs], object], patch: pytest.MonkeyPatch
) -> DiskBlobs:
    """Assemble a blob, and let something happen between its last check and its renaming."""
    blobs = DiskBlobs(folder)
    partial = blobs.partial(blob_id(data), len(data), chunk_digests(data))
    partial.write(0, data)
    patch.setattr("spes_p2p.storage.partial.fsync", lambda _: at_the_last_moment(blobs))
    partial.finish()
    return blobs


def test_blob_that_is_put_while_its_fetch_ends_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"an average that this node has just made itself"
    blobs = finishing(tmp_path, data, lambda blobs: blobs.put(data), monkeypatch)
    assert bytes(blobs.read(blob_id(data))) == data
    assert blobs.partial_ids() == ()


def test_blob_that_is_deleted_while_its_fetch_ends_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"nobody wants this any more"
    with pytest.raises(BlobError, match="deleted while it was being fetched"):
        finishing(tmp_path, data, lambda blobs: blobs.delete(blob_id(data)), monkeypatch)
