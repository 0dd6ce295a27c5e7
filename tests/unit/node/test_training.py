"""What the node makes of its trainer's answers."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable

import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import MachineError, NotFiniteError, TrainerError
from spes_p2p.node.settle import Since
from spes_p2p.node.training import Training
from spes_p2p.node.worker_messages import HandoverExported, LoadStart, Piece, Published, Started, Trained
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.wire import PieceKind
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME = FOUNDERS[0]
HEAD = cases.owned_head(FOUNDERS)
SHARD = HEAD.state.shards_of(ME.peer_id)[0]
ORDER = fx.Train(round=HEAD.round + 1, inner_steps=10)


class Trainer:
    """Answers as scripted."""

    def __init__(
        self,
        *,
        num_steps: int = 10,
        mean_loss: float = 2.0,
        error: Exception | None = None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.num_steps, self.mean_loss, self.error, self.notices = num_steps, mean_loss, error, notices
        self.loads: list[LoadStart] = []
        self.asked: list[str] = []
        self.round = 0

    async def load_start(self, request: LoadStart) -> Started:
        self.loads.append(request)
        self.round = request.spec.round + 1
        return Started(round=self.round, nats_per_byte=1.25)

    async def train(self, num_inner_steps: int) -> Trained:
        self.asked.append(f"train {num_inner_steps}")
        return Trained(
            round=self.round, num_steps=self.num_steps, num_skipped=1, tokens=320, mean_loss=self.mean_loss,
            seconds=1.0, finite=True, notices=self.notices,
        )  # fmt: skip

    async def publish(self) -> Published:
        self.asked.append("publish")
        if self.error is not None:
            raise self.error
        psi = tuple(Piece(index=part, blob=digest("psi", part), size_bytes=9, squared_norm=1.0) for part in range(4))
        expert = Piece(index=SHARD, blob=digest("expert", self.round), size_bytes=9, squared_norm=1.0)
        return Published(
            round=self.round, tokens=320, num_steps=10, mean_loss=self.mean_loss, psi=psi, experts=(expert,)
        )


def training_of(trainer: Trainer, ledger: Ledger, notes: list[str] | None = None) -> Training:
    told = notes if notes is not None else []
    return Training(HEAD.run.config, ME.peer_id, trainer, ledger, 1_000, lambda level, text: told.append(text))


async def test_update_names_every_part_and_shard_with_what_it_is_based_on(ledger: Ledger) -> None:
    training = training_of(Trainer(), ledger)
    assert await training.load(HEAD, None, None) == 1.25
    result = await training.train(ORDER)
    assert (result.round, result.tokens, result.steps, result.loss_micronats) == (2, 320, 10, 2_000_000)
    assert [piece.base_row for piece in result.pieces[:4]] == list(HEAD.parts)
    expert = result.pieces[4]
    assert (expert.kind, expert.index) == (PieceKind.EXPERT, SHARD)
    assert expert.base_row == shard_row_hash(HEAD.state.shards[SHARD])


async def test_round_whose_start_is_not_loaded_gives_nothing(ledger: Ledger) -> None:
    trainer = Trainer()
    training = training_of(trainer, ledger)
    assert await training.train(ORDER) == fx.nothing_trained(2)
    await training.load(HEAD, None, None)
    assert await training.train(fx.Train(round=7, inner_steps=10)) == fx.nothing_trained(7)
    assert trainer.asked == []


async def test_training_without_a_step_is_not_published(ledger: Ledger) -> None:
    trainer = Trainer(num_steps=0)
    training = training_of(trainer, ledger)
    await training.load(HEAD, None, None)
    assert await training.train(ORDER) == fx.nothing_trained(2)
    assert trainer.asked == ["train 10"]


@pytest.mark.parametrize("error", [TrainerError("the trainer process died"), NotFiniteError("withheld")])
async def test_update_that_is_lost_or_withheld_is_told_and_nothing_is_given(ledger: Ledger, error: Exception) -> None:
    notes: list[str] = []
    training = training_of(Trainer(error=error), ledger, notes)
    await training.load(HEAD, None, None)
    assert await training.train(ORDER) == fx.nothing_trained(2)
    assert notes == ["round 2: 1 steps were skipped (not finite)", f"round 2 gives no update: {error}"]


async def test_full_disk_is_not_a_lost_update(ledger: Ledger) -> None:
    training = training_of(Trainer(error=MachineError("disk full")), ledger)
    await training.load(HEAD, None, None)
    with pytest.raises(MachineError):
        await training.train(ORDER)


async def test_loss_that_is_no_number_is_stated_as_none(ledger: Ledger) -> None:
    training = training_of(Trainer(mean_loss=math.nan), ledger)
    await training.load(HEAD, None, None)
    assert (await training.train(ORDER)).loss_micronats == 0


async def test_own_blobs_are_remembered_over_a_restart(ledger: Ledger) -> None:
    training = training_of(Trainer(), ledger)
    await training.load(HEAD, None, None)
    update = cases.update_of(HEAD, ME, shards=[SHARD])
    result = await training.train(ORDER)
    so_far = Since(before=HEAD, owned=frozenset([SHARD]), accepted_update=2)
    after = cases.follow(HEAD, [cases.item_of(update, cases.receipt_of(update, FOUNDERS))])
    row = after.state.shards[SHARD]
    mine = type(row)(SHARD, (type(row.blobs[0])(result.pieces[4].blob, 320),))
    shards = tuple(mine if other.shard == SHARD else other for other in after.state.shards)
    state = type(after.state)(after.state.roster, after.state.leases, shards)
    trainer = Trainer()
    again = training_of(trainer, ledger)
    await again.load(dataclasses.replace(after, state=state), None, so_far)
    assert trainer.loads[0].masters == {SHARD: "carry"}
    assert (trainer.loads[0].residual, trainer.loads[0].accepted_update) == ("advance", 2)


async def test_what_the_trainer_wants_the_user_to_hear_is_told(ledger: Ledger) -> None:
    notes: list[str] = []
    training = training_of(Trainer(notices=("out of memory with A; going on with B",)), ledger, notes)
    await training.load(HEAD, None, None)
    await training.train(ORDER)
    assert "out of memory with A; going on with B" in notes


class Packing(Trainer):
    """Hands over; before each shard, `meanwhile` is called."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    async def export_handover(self, shard: int) -> HandoverExported:
        self.meanwhile()
        for _ in range(10):  # whoever can go on does
            await asyncio.sleep(0)
        return HandoverExported(shard=shard, blob=digest("hand-over", shard), size_bytes=7)


async def test_certificates_during_an_export_are_loaded_after_its_last_shard(ledger: Ledger) -> None:
    shards = HEAD.state.shards_of(ME.peer_id)
    assert len(shards) == 2
    later = cases.genesis_of(FOUNDERS)
    assert not later.state.shards_of(ME.peer_id)
    loads: list[asyncio.Task[float | None]] = []
    trainer = Packing(lambda: loads.append(asyncio.create_task(training.load(later, None, None))))
    training = training_of(trainer, ledger)
    await training.load(HEAD, None, None)
    assert await training.export() == {shard: (digest("hand-over", shard), 7) for shard in shards}
    assert training.loaded is HEAD
    await asyncio.gather(*loads)
    assert training.loaded is later
    assert len(trainer.loads) == 3


async def test_an_export_begins_after_the_load_that_is_under_way(ledger: Ledger) -> None:
    training = training_of(Packing(lambda: None), ledger)
    loading = asyncio.create_task(training.load(HEAD, None, None))
    await asyncio.sleep(0)
    assert set(await training.export()) == set(HEAD.state.shards_of(ME.peer_id))
    await loading
