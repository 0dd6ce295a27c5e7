"""What the keeper deletes, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.digests import blob_id, chunk_digests
from spes_p2p.node.keeping import KEEP_ROUNDS, Keeper
from spes_p2p.storage.blobs import DiskBlobs


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobs:
    return DiskBlobs(tmp_path / "blobs")


async def test_blob_stays_for_three_rounds_after_the_last_that_named_it(blobs: DiskBlobs) -> None:
    keeper, blob = Keeper(blobs, []), blobs.put(b"part")
    keeper.note([blob], 5)
    assert await keeper.sweep(5 + KEEP_ROUNDS) == 0
    assert blobs.has(blob)
    assert await keeper.sweep(6 + KEEP_ROUNDS) == 1
    assert not blobs.has(blob)


async def test_blob_that_is_named_again_gets_its_time_again(blobs: DiskBlobs) -> None:
    keeper, blob = Keeper(blobs, []), blobs.put(b"part")
    keeper.note([blob], 5)
    keeper.note([blob], 8)
    keeper.note([blob], 6)
    assert await keeper.sweep(8 + KEEP_ROUNDS) == 0


async def test_pinned_blobs_stay_for_ever(blobs: DiskBlobs) -> None:
    held_out, handed = blobs.put(b"held out"), blobs.put(b"handed")
    keeper = Keeper(blobs, [held_out])
    keeper.note([held_out, handed], 1)
    keeper.pin([handed])
    assert await keeper.sweep(1_000) == 0


async def test_blob_that_nobody_named_goes_after_its_time(blobs: DiskBlobs) -> None:
    keeper, blob = Keeper(blobs, []), blobs.put(b"left by a trainer that died")
    assert await keeper.sweep(7) == 0
    assert await keeper.sweep(7 + KEEP_ROUNDS) == 0
    assert await keeper.sweep(8 + KEEP_ROUNDS) == 1
    assert not blobs.has(blob)


async def test_blob_that_was_fetched_in_part_and_given_up_goes_too(blobs: DiskBlobs) -> None:
    data = b"x" * 100
    blobs.partial(blob_id(data), len(data), chunk_digests(data))
    keeper = Keeper(blobs, [])
    assert await keeper.sweep(1) == 0
    assert blobs.partial_ids() == (blob_id(data),)
    assert await keeper.sweep(2 + KEEP_ROUNDS) == 1
    assert blobs.partial_ids() == ()


async def test_blob_that_is_named_while_others_are_deleted_stays(blobs: DiskBlobs) -> None:
    first, second = sorted(blobs.put(data) for data in (b"one", b"two"))

    class Shelf:
        def ids(self) -> tuple:
            return blobs.ids()

        def partial_ids(self) -> tuple:
            return ()

        def delete(self, blob: object) -> None:
            assert blob == first
            keeper.note([second], 50)
            blobs.delete(first)

    keeper = Keeper(Shelf(), [])
    keeper.note([first, second], 1)
    assert await keeper.sweep(50) == 1
    assert blobs.ids() == (second,)
