"""The certified state on its way to the disk and into the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node import state_sync as state_sync_module
from spes_p2p.node.fetching import Holdings
from spes_p2p.node.keeping import Keeper
from spes_p2p.node.settle import Since, since
from spes_p2p.node.state_sync import Newest, StateSync, state_blobs
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.clock import VirtualClock

FOUNDERS = cases.identities(3)
ME = FOUNDERS[0]
HEAD = cases.owned_head(FOUNDERS)


class Shelf:
    """A store of names, and a network that brings them, blocks, or fails."""

    def __init__(self) -> None:
        self.here: set[Digest] = set()
        self.blocks = asyncio.Event()
        self.blocks.set()
        self.num_failures = 0
        self.cancelled: list[Digest] = []
        self.sources: tuple[PeerId, ...] = ()

    def has(self, blob: Digest) -> bool:
        return blob in self.here

    def ids(self) -> tuple[Digest, ...]:
        return tuple(self.here)

    def partial_ids(self) -> tuple[Digest, ...]:
        return ()

    def delete(self, blob: Digest) -> None:
        self.here.discard(blob)

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        self.sources = tuple(sources)
        try:
            await self.blocks.wait()
        except asyncio.CancelledError:
            self.cancelled.append(blob)
            raise
        if self.num_failures:
            self.num_failures -= 1
            raise BlobError("no source is left")
        self.here.add(blob)


class Trainer:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.loads: list[tuple[int, Since | None]] = []

    async def load(self, head: Head, certificate: object, so_far: Since | None) -> float:
        self.loads.append((head.round, so_far))
        if self.errors:
            raise self.errors.pop(0)
        return 1.5


def sync_of(shelf: Shelf, ledger: Ledger, so_far: Since | None = None) -> StateSync:
    begin = Newest(head=HEAD, certificate=None, since=so_far)
    holdings = Holdings(blobs=shelf, fetcher=shelf, keeper=Keeper(shelf, []))
    return StateSync(ME.peer_id, begin, holdings, ledger, VirtualClock(), lambda level, text: None)


def adoption(head: Head = HEAD) -> fx.Adopt:
    """A round in which only ME delivered."""
    update = cases.update_of(head, ME)
    items = [cases.item_of(update, cases.receipt_of(update, FOUNDERS))]
    body = cases.body_of(head, cases.transition_of(head, items), merge_lists=b"lists")
    certificate = cases.certificate_of(head, body, FOUNDERS, b"lists" if body.merge_alpha else b"")
    return fx.Adopt(certificate=certificate, head=next_head(head, body), holders=(), handovers=())


async def test_state_is_complete_once_every_blob_is_here(ledger: Ledger) -> None:
    shelf = Shelf()
    sync = sync_of(shelf, ledger)
    stranger = PeerId(b"s" * 32)
    sync.knows([stranger, ME.peer_id])
    assert await sync.bring_state(HEAD)
    assert shelf.here == set(state_blobs(HEAD))
    assert sync.blobs_missing == 0
    assert set(shelf.sources) == {FOUNDERS[1].peer_id, FOUNDERS[2].peer_id, stranger}


async def test_fetch_that_fails_is_tried_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_sync_module, "_RETRY_S", 0.0)
    shelf = Shelf()
    shelf.num_failures = 5
    assert await sync_of(shelf, ledger).bring_state(HEAD)


async def test_newer_certificate_ends_the_fetching_of_an_older_state(ledger: Ledger) -> None:
    shelf = Shelf()
    shelf.blocks.clear()
    sync = sync_of(shelf, ledger)
    bringing = asyncio.create_task(sync.bring_state(HEAD))
    while sync.blobs_missing == 0:
        await asyncio.sleep(0)
    sync.adopted(adoption())
    assert not await asyncio.wait_for(bringing, 60)
    assert shelf.cancelled
    shelf.blocks.set()
    assert await sync.bring_state(sync.head)
    assert not await sync.bring_state(HEAD)


async def test_trainer_hears_of_every_certificate_since_its_start(ledger: Ledger) -> None:
    sync, trainer = sync_of(Shelf(), ledger, since(HEAD, ME.peer_id)), Trainer()
    effect = adoption()
    sync.adopted(effect)
    await sync.load_trainer(trainer)
    sync.adopted(adoption(effect.head))
    await sync.load_trainer(trainer)
    (_, first), (_, second) = trainer.loads
    assert first is not None
    assert second is not None
    assert (first.before, first.accepted_update) == (HEAD, 2)
    assert (second.before, second.accepted_update) == (effect.head, 3)
    assert sync.val_curve == [(2, 1.5), (3, 1.5)]


async def test_certificate_that_comes_during_a_load_counts_for_the_next_one(ledger: Ledger) -> None:
    sync = sync_of(Shelf(), ledger)
    effect = adoption()

    class Slow(Trainer):
        async def load(self, head: Head, certificate: object, so_far: Since | None) -> float:
            if not self.loads:
                sync.adopted(effect)
            return await super().load(head, certificate, so_far)

    trainer = Slow()
    await sync.load_trainer(trainer)
    await sync.load_trainer(trainer)
    assert trainer.loads[0] == (HEAD.round, None)
    number, second = trainer.loads[1]
    assert number == effect.head.round
    assert second is not None
    assert (second.before, second.accepted_update) == (HEAD, 2)


async def test_blob_that_turns_out_damaged_is_fetched_again_before_the_load_is_given_up(ledger: Ledger) -> None:
    shelf = Shelf()
    sync, trainer = sync_of(shelf, ledger), Trainer(BlobError("damaged"), BlobError("damaged"))
    await sync.load_trainer(trainer)
    assert len(trainer.loads) == 3
    assert shelf.here == set(state_blobs(HEAD))
    with pytest.raises(BlobError):
        await sync.load_trainer(Trainer(*(BlobError("damaged") for _ in range(3))))
