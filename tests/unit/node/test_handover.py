"""The index of a hand-over, and who takes over what."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import BlobError, SchemaError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.fetching import Holdings
from spes_p2p.node.handover import Successions, decode_index, encode_index
from spes_p2p.node.keeping import Keeper
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Leave
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.blobs import MemoryBlobs

FOUNDERS = cases.identities(3)
LEAVER, ME = FOUNDERS[0], FOUNDERS[1]


def test_index_comes_back_as_it_went() -> None:
    shards = {5: (digest("b"), 70), 2: (digest("a"), 90)}
    assert decode_index(encode_index(shards)) == shards


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        msgspec.msgpack.encode([[1, b"short", 5]]),
        msgspec.msgpack.encode([[1, b"x" * 32, -5]]),
        msgspec.msgpack.encode([["1", b"x" * 32, 5]]),
    ],
)
def test_anything_else_is_no_index(data: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_index(data)


class Fetcher:
    """Serves what the leaver has, and notes how much was allowed."""

    def __init__(self, store: MemoryBlobs, source: MemoryBlobs) -> None:
        self.store, self.source = store, source
        self.limits: dict[Digest, int | None] = {}

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        assert list(sources) == [LEAVER.peer_id]
        self.limits[blob] = max_bytes
        if not self.source.has(blob):
            raise BlobError("not there")
        self.store.put(self.source.read(blob))


class Heir:
    def __init__(self) -> None:
        self.taken: list[tuple[int, Digest]] = []

    async def take_over(self, shard: int, blob: Digest) -> None:
        self.taken.append((shard, blob))


def leave() -> tuple[Head, Head]:
    """Heads before and after a certificate in which LEAVER leaves."""
    head = cases.owned_head(FOUNDERS, capacity=4)
    body = Leave(head.run.run_id, head.epoch, head.round + 1, NO_DIGEST, 0)
    items = [cases.item_of(sign(LEAVER, body)), *(cases.item_of(cases.alive_of(head, peer)) for peer in FOUNDERS[1:])]
    items += [cases.item_of(cases.claim_of(head, ME, capacity=8))]
    return head, cases.follow(head, items)


def adopt(handover: Digest) -> tuple[Head, Head, fx.Adopt]:
    before, after = leave()
    effect = fx.Adopt(
        certificate=None,  # type: ignore[arg-type]  # not looked at
        head=after,
        holders=(),
        handovers=((LEAVER.peer_id, handover, 100),),
    )
    return before, after, effect


async def test_successor_imports_the_shards_that_are_new_to_it_and_tells_the_leaver() -> None:
    before, after, _ = adopt(NO_DIGEST)
    gained = sorted(set(before.state.shards_of(LEAVER.peer_id)) & set(after.state.shards_of(ME.peer_id)))
    assert gained
    source, store, notes = MemoryBlobs(), MemoryBlobs(), []
    blobs = {shard: source.put(b"masters of %d" % shard) for shard in gained}
    index = source.put(encode_index({shard: (blob, 20) for shard, blob in blobs.items()}))
    fetcher, heir = Fetcher(store, source), Heir()
    holdings = Holdings(blobs=store, fetcher=fetcher, keeper=Keeper(_NoShelf(), []))
    successions = Successions(ME.peer_id, holdings, lambda level, text: notes.append(text))
    before, after, effect = adopt(index)
    successions.adopted(before, effect)
    told = await successions.take(heir, after)
    assert heir.taken == [(shard, blobs[shard]) for shard in gained]
    assert told == [fx.HandoverTaken(leaver=LEAVER.peer_id, round=after.round, handover=index)]
    assert max(limit or 0 for blob, limit in fetcher.limits.items() if blob != index) < 1_000_000
    assert notes == []
    assert await successions.take(heir, after) == []


async def test_hand_over_that_cannot_be_had_is_done_without_and_the_leaver_is_told() -> None:
    before, after, effect = adopt(digest("nowhere"))
    notes: list[str] = []
    heir = Heir()
    store = MemoryBlobs()
    holdings = Holdings(blobs=store, fetcher=Fetcher(store, MemoryBlobs()), keeper=Keeper(_NoShelf(), []))
    successions = Successions(ME.peer_id, holdings, lambda level, text: notes.append(text))
    successions.adopted(before, effect)
    told = await successions.take(heir, after)
    assert [taken.leaver for taken in told] == [LEAVER.peer_id]
    assert heir.taken == []
    assert "could not be taken" in notes[0]


class _NoShelf:
    def ids(self) -> tuple[Digest, ...]:
        return ()

    def partial_ids(self) -> tuple[Digest, ...]:
        return ()

    def delete(self, blob: Digest) -> None:
        raise AssertionError("nothing is deleted here")
