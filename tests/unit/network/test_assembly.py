from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.digests import CHUNK_BYTES, blob_id, chunk_digests
from spes_p2p.errors import BlobError
from spes_p2p.network.assembly import RANGE_CHUNKS, Assembly, TooLargeError, ranges
from spes_p2p.testing.blobs import MemoryBlobs

DATA = Random(1).randbytes(10 * CHUNK_BYTES + 5)
CHUNKS = chunk_digests(DATA)
BLOB = blob_id(DATA)


def chunk(index: int) -> bytes:
    return DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@given(st.sets(st.integers(min_value=0, max_value=100)))
def test_ranges_cover_exactly_what_is_missing(missing: set[int]) -> None:
    found = ranges(tuple(sorted(missing)))
    assert [index for start, stop in found for index in range(start, stop)] == sorted(missing)
    assert all(0 < stop - start <= RANGE_CHUNKS for start, stop in found)


async def test_a_list_of_another_blob_is_refused() -> None:
    assembly = Assembly(MemoryBlobs(), BLOB, len(DATA))
    for size_bytes, chunks in ((len(DATA) - 1, CHUNKS), (len(DATA), CHUNKS[::-1]), (len(DATA), CHUNKS[:-1]), (0, ())):
        with pytest.raises(BlobError):
            await assembly.plan(size_bytes, chunks)
    assert not assembly.is_planned


async def test_a_blob_above_the_limit_is_refused_before_anything_is_stored() -> None:
    assembly = Assembly(MemoryBlobs(), BLOB, len(DATA) - 1)
    with pytest.raises(TooLargeError, match=str(len(DATA))):
        await assembly.plan(len(DATA), CHUNKS)
    assert not assembly.is_planned


async def test_a_range_that_was_not_delivered_goes_to_the_next_source() -> None:
    blobs = MemoryBlobs()
    assembly = Assembly(blobs, BLOB, len(DATA))
    await assembly.plan(len(DATA), CHUNKS)
    first, second = await assembly.take(), await assembly.take()
    assert (first, second) == ((0, 8), (8, 11))
    for index in range(8, 11):
        await assembly.write(index, chunk(index))
    await assembly.give_back(11, 11)
    waiting = asyncio.create_task(assembly.take())
    for index in range(3):
        await assembly.write(index, chunk(index))
    await assembly.give_back(3, 8)
    assert await waiting == (3, 8)
    for index in range(3, 8):
        await assembly.write(index, chunk(index))
    assert not assembly.is_complete
    await assembly.give_back(8, 8)
    assert assembly.is_complete
    assert await assembly.take() is None
    await assembly.finish()
    assert bytes(blobs.read(BLOB)) == DATA


async def test_chunks_that_are_here_are_not_fetched_again() -> None:
    blobs = MemoryBlobs()
    blobs.partial(BLOB, len(DATA), CHUNKS).write(4, chunk(4))
    assembly = Assembly(blobs, BLOB, len(DATA))
    await assembly.plan(len(DATA), CHUNKS)
    assert [await assembly.take(), await assembly.take()] == [(0, 4), (5, 11)]
