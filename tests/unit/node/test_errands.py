"""What becomes of the machine's errands when blobs are missing, damaged or not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import BlobError, MachineError, NotFiniteError, SchemaError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node import errands as errands_module
from spes_p2p.node.errands import Errands
from spes_p2p.node.fetching import Holdings
from spes_p2p.node.keeping import Keeper
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.transition import Contribution
from spes_p2p.protocol.wire import NO_DIGEST, RefusalReason
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
HEAD = cases.owned_head(FOUNDERS)
PIECES = cases.pieces_of(HEAD, FOUNDERS[0].peer_id)
VALUE = digest("value")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands_module, "_RETRY_S", 0.0)


class Work:
    """Arithmetic that gives what it is told, or raises it."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.unseen: RefusalReason | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def _next(self, *_: object) -> Any:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    check_piece = aggregate = rank = ranking_problem = _next

    def refuse_unseen(self, piece: object) -> RefusalReason | None:
        return self.unseen


class World:
    """A node around the errands: a store that has everything or nothing, and a network that may fail."""

    def __init__(self, *results: object, has: bool = True) -> None:
        self.has_all = has
        self.fails = 0
        self.fetched: list[Digest] = []
        self.given: list[fx.Input] = []
        self.notes: list[str] = []
        self.head = HEAD
        self.errands = Errands(
            Holdings(blobs=self, fetcher=self, keeper=Keeper(self, [])),
            Work(*results),
            lambda: self.head,
            self.given.append,
            lambda level, text: self.notes.append(text),
        )

    def has(self, blob: Digest) -> bool:
        return self.has_all

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        self.fetched.append(blob)
        if self.fails:
            self.fails -= 1
            raise BlobError("no source is left")


def check() -> fx.CheckPiece:
    return fx.CheckPiece(
        manifest=digest("manifest"), author=FOUNDERS[0].peer_id, piece_index=0, piece=PIECES[0], base=(), sources=()
    )


def aggregation(*, recheck: bool = False) -> fx.Aggregate:
    contribution = Contribution(
        peer=FOUNDERS[0].peer_id, manifest=NO_DIGEST, pieces=PIECES[: cases.NUM_PARTS], weight=1.0, clip=1.0
    )
    return fx.Aggregate(
        updates=NO_DIGEST, part=1, previous=HEAD.parts[1], contributions=(contribution,), sources={}, recheck=recheck
    )


async def test_piece_that_fits_is_acknowledged() -> None:
    here = World(None)
    await here.errands.check_piece(check(), HEAD)
    assert here.given == [fx.PieceChecked(manifest=digest("manifest"), piece=0, reason=None)]
    assert here.errands.tally.updates_acknowledged == 1


async def test_piece_that_is_refused_is_counted() -> None:
    here = World(RefusalReason.NOT_FINITE)
    await here.errands.check_piece(check(), HEAD)
    assert [event.reason for event in here.given] == [RefusalReason.NOT_FINITE]
    assert here.errands.tally.pieces_refused == 1


async def test_piece_that_cannot_be_had_or_was_damaged_on_disk_is_missing() -> None:
    away = World(has=False)
    away.fails = 1
    await away.errands.check_piece(check(), HEAD)
    damaged = World(BlobError("damaged"))
    await damaged.errands.check_piece(check(), HEAD)
    assert [event.reason for event in away.given + damaged.given] == [RefusalReason.MISSING] * 2
    assert away.errands.tally.pieces_refused == 0


async def test_part_is_averaged_once_all_pieces_are_here() -> None:
    here = World(VALUE, has=False)
    here.fails = 2
    await here.errands.aggregate(aggregation(), HEAD)
    assert here.fetched == [PIECES[1].blob] * 3
    assert here.given == [fx.Aggregated(updates=NO_DIGEST, part=1, digest=VALUE, recheck=False)]


async def test_aggregation_ends_with_its_round() -> None:
    here = World(has=False)
    here.fails = 1_000
    here.head = cases.follow(HEAD, [])
    await here.errands.aggregate(aggregation(), HEAD)
    assert here.given == []
    assert len(here.fetched) == 1


async def test_piece_that_was_damaged_before_the_average_is_brought_again() -> None:
    here = World(BlobError("damaged and dropped"), VALUE)
    await here.errands.aggregate(aggregation(recheck=True), HEAD)
    assert [event.digest for event in here.given] == [VALUE]
    assert (here.errands.tally.rechecks, here.errands.tally.parts_aggregated) == (1, 0)


@pytest.mark.parametrize("error", [NotFiniteError("not finite"), SchemaError("another form")])
async def test_part_that_cannot_be_averaged_is_told(error: Exception) -> None:
    here = World(error)
    await here.errands.aggregate(aggregation(), HEAD)
    assert here.given == []
    assert here.notes == [f"part 1 cannot be averaged: {error}"]


async def test_ranking_over_damaged_blobs_is_told_and_not_given() -> None:
    here = World(BlobError("damaged"), BlobError("damaged"))
    await here.errands.rank(fx.RankExperts(cut=NO_DIGEST, shards=()), HEAD)
    await here.errands.check_ranking(fx.CheckRanking(body=NO_DIGEST, shards=(), merge_lists=b""), HEAD)
    assert here.given == []
    assert len(here.notes) == 2


async def test_full_disk_is_not_an_errands_business() -> None:
    here = World(MachineError("disk full"))
    with pytest.raises(MachineError):
        await here.errands.aggregate(aggregation(), HEAD)
