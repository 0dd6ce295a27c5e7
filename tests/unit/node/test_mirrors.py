"""Bootstrap nodes as the last place to get a blob from."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node import mirrors as mirrors_module
from spes_p2p.node.mirrors import PAUSE_MS, Mirrors
from spes_p2p.testing.clock import VirtualClock

ENTRIES = (PeerId(b"a" * 32), PeerId(b"b" * 32))
BLOB = Digest(b"x" * 32)


class Fetcher:
    def __init__(self, *, has: bool) -> None:
        self.has = has
        self.asked: list[tuple[Digest, tuple[PeerId, ...], int | None]] = []

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        self.asked.append((blob, tuple(sources), max_bytes))
        if not self.has:
            raise BlobError("no source is left")


async def test_all_of_them_are_sources() -> None:
    fetcher = Fetcher(has=True)
    assert await Mirrors(fetcher, ENTRIES, VirtualClock()).bring(BLOB, 7)
    assert fetcher.asked == [(BLOB, ENTRIES, 7)]


async def test_one_that_lacks_a_blob_is_not_asked_for_it_again_at_once() -> None:
    fetcher, clock = Fetcher(has=False), VirtualClock()
    mirrors = Mirrors(fetcher, ENTRIES, clock)
    for _ in range(3):
        assert not await mirrors.bring(BLOB, 7)
    assert len(fetcher.asked) == 1
    assert not await mirrors.bring(Digest(b"y" * 32), 7)
    assert len(fetcher.asked) == 2
    clock.jump(PAUSE_MS)
    assert not await mirrors.bring(BLOB, 7)
    assert len(fetcher.asked) == 3


async def test_without_bootstrap_nodes_nobody_is_asked() -> None:
    fetcher = Fetcher(has=True)
    assert not await Mirrors(fetcher, (), VirtualClock()).bring(BLOB, 7)
    assert not fetcher.asked


async def test_what_was_asked_for_is_forgotten_in_the_end() -> None:
    mirrors = Mirrors(Fetcher(has=False), ENTRIES, VirtualClock())
    for number in range(mirrors_module._MAX_REMEMBERED + 10):
        await mirrors.bring(Digest(number.to_bytes(32, "big")), 7)
    assert len(mirrors._tried_at_ms) == mirrors_module._MAX_REMEMBERED
