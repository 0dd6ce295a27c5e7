"""The mirror: what it brings, and that its cap holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from spes_p2p.bootstrap.mirror import Mirror
from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.testing.blobs import MemoryBlobs

RUN, OTHER = RunId(b"r" * 32), RunId(b"o" * 32)
SOURCES = (PeerId(b"p" * 32),)


class Members:
    """Peers that have blobs, as a transport brings them."""

    def __init__(self, store: DiskBlobs) -> None:
        self.theirs = MemoryBlobs()
        self.store = store
        self.num_fetches = 0

    def blob(self, content: bytes) -> Digest:
        return self.theirs.put(content)

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        self.num_fetches += 1
        assert tuple(sources) == SOURCES
        assert max_bytes is not None
        if self.theirs.size_bytes(blob) > max_bytes:
            raise BlobError("too large")
        self.store.put(bytes(self.theirs.read(blob)))


@pytest.fixture
def store(tmp_path: Path) -> DiskBlobs:
    return DiskBlobs(tmp_path / "blobs")


@pytest.fixture
def members(store: DiskBlobs) -> Members:
    return Members(store)


async def test_the_newest_state_of_each_run_is_kept_and_older_ones_go(store: DiskBlobs, members: Members) -> None:
    mirror = Mirror(store, members, 1_000)
    old, both, new, other = (members.blob(bytes([number]) * 100) for number in range(4))
    await mirror.follow(OTHER, (other,), SOURCES)
    await mirror.follow(RUN, (old, both), SOURCES)
    await mirror.follow(RUN, (both, new), SOURCES)
    assert set(store.ids()) == {both, new, other}
    assert (mirror.size_bytes, members.num_fetches) == (300, 4)
    await mirror.drop(OTHER)
    assert set(store.ids()) == {both, new}


async def test_the_cap_holds_and_what_fits_is_kept(store: DiskBlobs, members: Members) -> None:
    mirror = Mirror(store, members, 250)
    blobs = tuple(members.blob(bytes([number]) * 100) for number in range(4))
    await mirror.follow(RUN, blobs, SOURCES)
    assert set(store.ids()) == set(blobs[:2])
    assert mirror.size_bytes == 200


async def test_an_older_state_makes_room_for_the_newest(store: DiskBlobs, members: Members) -> None:
    mirror = Mirror(store, members, 200)
    old = tuple(members.blob(bytes([number]) * 100) for number in range(2))
    new = tuple(members.blob(bytes([number]) * 100) for number in range(2, 4))
    await mirror.follow(RUN, old, SOURCES)
    await mirror.follow(RUN, new, SOURCES)
    assert set(store.ids()) == set(new)


async def test_without_a_cap_nothing_is_brought_and_what_was_left_is_deleted(
    store: DiskBlobs, members: Members
) -> None:
    left = store.put(b"left")
    mirror = Mirror(store, members, 0)
    await mirror.begin({RUN: (left,)})
    await mirror.follow(RUN, (members.blob(b"x"),), SOURCES)
    assert (tuple(store.ids()), members.num_fetches) == ((), 0)


async def test_after_a_restart_what_is_wanted_still_is_kept(store: DiskBlobs, members: Members) -> None:
    wanted, unwanted = store.put(b"wanted"), store.put(b"unwanted")
    mirror = Mirror(store, members, 1_000)
    await mirror.begin({RUN: (wanted,)})
    assert tuple(store.ids()) == (wanted,)
    assert mirror.size_bytes == len(b"wanted")
    assert unwanted not in store.ids()
