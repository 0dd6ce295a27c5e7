"""Which of loading and training waits for which."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from spes_p2p.errors import BlobError, MachineError, TrainerError
from spes_p2p.node.holds import Holds
from spes_p2p.node.rounds import RoundTasks
from spes_p2p.protocol import effects as fx
from spes_p2p.testing import protocol_cases as cases

HEAD = cases.owned_head(cases.identities(3))
NEXT = cases.follow(HEAD, [])
ORDER = fx.Train(round=HEAD.round + 1, inner_steps=10)
LATER = fx.Train(round=NEXT.round + 1, inner_steps=10)
PIECES = cases.pieces_of(HEAD, cases.identities(3)[0].peer_id)


class Scripted:
    """State and trainer that do what the test says, when it says so."""

    def __init__(self) -> None:
        self.head = HEAD
        self.events: list[str] = []
        self.state_here = asyncio.Event()
        self.loaded = asyncio.Event()
        self.trained = asyncio.Event()
        self.error: Exception | None = None
        self.given: list[fx.Input] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.notes: list[str] = []
        self.holds = Holds()
        self.rounds = RoundTasks(
            self, self, self.spawn, self.given.append, lambda level, text: self.notes.append(text), self.holds
        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def bring_state(self, head: object) -> bool:
        await self.state_here.wait()
        self.events.append(f"state {head.round}")
        return self.head is head

    async def load_trainer(self, training: object) -> list[fx.HandoverTaken]:
        if self.error is not None:
            raise self.error
        await self.loaded.wait()
        self.events.append("loaded")
        return []

    async def train(self, order: fx.Train) -> fx.Trained:
        self.events.append(f"train {order.round}")
        await self.trained.wait()
        return fx.Trained(round=order.round, tokens=64, steps=1, loss_micronats=1, pieces=PIECES)

    def stop(self) -> None:
        self.events.append("stop")
        self.trained.set()

    def published(self, result: fx.Trained) -> None:
        self.events.append(f"published {result.round}")

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_training_waits_for_its_start() -> None:
    scripted = Scripted()
    scripted.rounds.load()
    scripted.state_here.set()
    await scripted.settle()
    assert scripted.given == [fx.StateReady(round=ORDER.round, head=HEAD.hash)]
    scripted.rounds.train(ORDER)
    await scripted.settle()
    assert scripted.events == ["state 1"]
    scripted.loaded.set()
    await scripted.settle()
    assert scripted.events == ["state 1", "loaded", "train 2"]
    scripted.trained.set()
    await scripted.settle()
    assert scripted.events[-1] == "published 2"
    assert scripted.given[-1].pieces == PIECES
    assert scripted.rounds.num_published == 1


async def test_training_that_was_stopped_before_it_began_gives_nothing() -> None:
    scripted = Scripted()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    scripted.rounds.stop(ORDER.round)
    scripted.state_here.set()
    scripted.loaded.set()
    await scripted.settle()
    assert scripted.given[-1] == fx.nothing_trained(ORDER.round)
    assert "train 2" not in scripted.events


async def test_newer_certificate_ends_the_training_under_way_and_its_update_comes_late() -> None:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    await scripted.settle()
    scripted.head = NEXT
    scripted.rounds.load()
    scripted.rounds.train(LATER)
    await scripted.settle()
    assert scripted.events == ["state 1", "loaded", "train 2", "state 2", "stop", "published 2", "loaded", "train 3",
                               "published 3"]  # fmt: skip
    assert [event.round for event in scripted.given] == [2, 3, 2, 3]


async def test_stop_of_an_older_round_does_not_stop_the_next_one() -> None:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    scripted.head = NEXT
    scripted.rounds.stop(ORDER.round)
    scripted.trained.clear()
    scripted.rounds.load()
    scripted.rounds.train(LATER)
    await scripted.settle()
    assert scripted.events[-1] == "train 3"
    await scripted.end()


async def test_load_that_was_overtaken_does_not_reach_the_trainer() -> None:
    scripted = Scripted()
    scripted.rounds.load()
    scripted.head = NEXT
    scripted.rounds.load()
    scripted.state_here.set()
    scripted.loaded.set()
    await scripted.settle()
    assert scripted.given == [fx.StateReady(round=LATER.round, head=NEXT.hash)]
    assert scripted.events == ["state 1", "state 2", "loaded"]


@pytest.mark.parametrize("error", [TrainerError("died"), BlobError("damaged again and again")])
async def test_load_that_fails_is_told_and_the_round_goes_on(error: Exception) -> None:
    scripted = Scripted()
    scripted.error = error
    scripted.state_here.set()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    scripted.trained.set()
    await scripted.settle()
    assert scripted.notes == [f"round 2 gets no update of this node: {error}"]
    assert all(task.exception() is None for task in scripted.tasks)


async def test_full_disk_ends_the_load_with_its_cause() -> None:
    scripted = Scripted()
    scripted.error = MachineError("disk full")
    scripted.state_here.set()
    scripted.rounds.load()
    await scripted.settle()
    assert isinstance(scripted.tasks[0].exception(), MachineError)


async def test_nothing_is_trained_once_training_is_finished() -> None:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    await scripted.settle()
    finishing = asyncio.create_task(scripted.rounds.finish())
    await scripted.settle()
    assert not finishing.done()
    scripted.trained.set()
    await scripted.settle()
    assert finishing.done()
    scripted.head = NEXT
    scripted.rounds.load()
    scripted.rounds.train(LATER)
    await scripted.settle()
    assert scripted.given[-1] == fx.nothing_trained(LATER.round)


async def test_training_on_a_branch_that_is_left_ends_and_gives_nothing_and_that_on_the_new_one_begins() -> None:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    scripted.head = NEXT
    scripted.rounds.load()
    scripted.rounds.train(LATER)
    await scripted.settle()
    assert scripted.events[-1] == "train 3"
    scripted.head = HEAD  # an earlier round again
    scripted.rounds.abandon()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    await scripted.settle()
    assert fx.nothing_trained(LATER.round, LATER.base) in scripted.given
    assert [event for event in scripted.events if event.startswith("published")] == ["published 2"]
    assert scripted.rounds.num_published == 1


def held(scripted: Scripted, is_held: bool) -> None:
    scripted.holds.set("pause", is_held)
    scripted.rounds.hold_changed()


async def loaded_and_held() -> Scripted:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    held(scripted, True)
    scripted.events.clear()
    scripted.trained.clear()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    await scripted.settle()
    assert scripted.events == ["state 1", "loaded"]
    assert scripted.rounds.is_held_back
    return scripted


async def test_round_that_is_held_back_is_trained_when_the_hold_ends() -> None:
    scripted = await loaded_and_held()
    held(scripted, False)
    await scripted.settle()
    assert scripted.events[-1] == "train 2"
    assert not scripted.rounds.is_held_back
    scripted.trained.set()
    await scripted.settle()
    assert scripted.given[-1].pieces == PIECES


async def test_round_that_is_held_back_gives_nothing_once_others_have_published() -> None:
    scripted = await loaded_and_held()
    scripted.rounds.give_up()
    await scripted.settle()
    assert scripted.given[-1] == fx.nothing_trained(ORDER.round)
    held(scripted, False)
    await scripted.settle()
    assert "train 2" not in scripted.events


async def test_round_that_is_held_back_ends_with_its_time() -> None:
    scripted = await loaded_and_held()
    scripted.rounds.stop(ORDER.round)
    await scripted.settle()
    assert scripted.given[-1] == fx.nothing_trained(ORDER.round)


async def test_leave_does_not_wait_for_the_end_of_a_hold() -> None:
    scripted = await loaded_and_held()
    await asyncio.wait_for(scripted.rounds.finish(), 60)
    assert scripted.given[-1] == fx.nothing_trained(ORDER.round)


async def test_training_under_way_ends_with_the_hold_and_is_handed_in() -> None:
    scripted = Scripted()
    scripted.state_here.set()
    scripted.loaded.set()
    scripted.rounds.load()
    scripted.rounds.train(ORDER)
    await scripted.settle()
    assert scripted.events[-1] == "train 2"
    held(scripted, True)
    await scripted.settle()
    assert scripted.events[-2:] == ["stop", "published 2"]
    assert scripted.given[-1].pieces == PIECES
