"""Several nodes in one process: what the driver makes of the machine's effects, with the real work behind it."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path

import pytest

from spes_p2p.config import Limits
from spes_p2p.errors import IdentityError, MachineError, RemoteProtocolError, TrainerError
from spes_p2p.ids import Digest
from spes_p2p.node.budgets.keeper import Budgets
from spes_p2p.node.budgets.month import MonthCount, month_of
from spes_p2p.node.budgets.power import GpuPower
from spes_p2p.node.budgets.store import write_month
from spes_p2p.node.driver import _REST_MS, MAX_WAITING
from spes_p2p.node.leaving import LeaveWish, leave_properly
from spes_p2p.node.worker_messages import LoadStart, Publish, Train
from spes_p2p.protocol import effects as fx
from spes_p2p.testing.nodes import WAIT_S, NodeSwarm, SwarmNode, node_swarm, patient_run

FOUNDERS = ["ada", "ben", "cleo"]
COUNTED = ("accepted", "accepted late")
"""On a busy machine acknowledgements may come after the cut of their round."""


async def start_founders(swarm: NodeSwarm, founders: list[str]) -> list[SwarmNode]:
    swarm.create(founders)
    nodes = [await swarm.start(name) for name in founders]
    swarm.introduce()
    return nodes


async def budgets(folder: Path, limits: Limits | None = None) -> Budgets:
    """Those of a node with these limits; the month's bytes so far are in the folder."""
    kept = Budgets(folder, lambda reason, held: None, lambda level, text: None, GpuPower(("cpu",), nvml=None))
    await kept.open(limits or Limits())
    await kept.limit_line(Line())
    return kept


class Line:
    """Of a node that has moved nothing since its start."""

    def set_rates(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        pass

    def set_no_blobs(self, reason: str, spared: frozenset[Digest]) -> None:
        pass

    def bytes_up(self) -> int:
        return 0

    def bytes_down(self) -> int:
        return 0


async def leave(node: SwarmNode, wish: LeaveWish, promises: Budgets) -> None:
    def notify(level: str, text: str) -> None:
        node.notes.append(text)

    await leave_properly(node.driver, node.tools.training, node.tools.blobs, notify, wish, promises)


def verdicts(node: SwarmNode) -> dict[int, str]:
    return {update.round: update.verdict for update in node.tools.sync.updates.latest(64)}


async def test_founders_and_a_late_joiner_certify_the_same_rounds(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", patient_run()) as swarm:
        ada, *_ = await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(3)
        dan = await swarm.start("dan", manifest_from="ada")
        swarm.introduce()
        await swarm.wait(lambda: "accepted" in verdicts(dan).values(), "accepted update of the joiner")
        reached = dan.round
        await swarm.wait_round(reached)
        histories = [node.history() for node in swarm.nodes.values()]
        assert all(history[number] == histories[0][number] for history in histories for number in range(1, reached + 1))
        assert len(ada.driver.machine.terms.members) == 4
        assert verdicts(ada)[2] == "accepted"
        assert sum(node.driver.errands.tally.parts_aggregated for node in swarm.nodes.values()) > 0
        assert 1 not in verdicts(ada)  # round 1 is for claims


async def test_node_that_is_killed_goes_on_from_its_ledger_and_journal(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(2)
        before = swarm.nodes["ben"].history()
        await swarm.kill("ben")
        ben = await swarm.start("ben")
        assert ben.round >= max(before)
        assert ben.history().items() >= before.items()
        swarm.introduce()
        await swarm.wait_round(ben.round + 2)
        assert swarm.nodes["ada"].driver.machine.head.state.row(ben.driver.machine.terms.members[0]) is not None
        assert len(ben.driver.machine.terms.members) == 3
        restarted_in = ben.round
        await swarm.wait(
            lambda: any(verdicts(ben).get(number) in COUNTED for number in range(restarted_in, ben.round + 1)),
            "update after the restart that counts",
        )


async def test_update_that_was_journalled_is_not_trained_again_after_a_restart(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        ada, ben = await start_founders(swarm, ["ada", "ben"])
        await swarm.wait_round(1)
        await swarm.kill("ben")  # without it, no round of two can end
        await swarm.wait(lambda: any("manifest/2" in key for key in ada.tools.journal.scan()), "journalled update")
        manifest = next(data for key, data in ada.tools.journal.scan().items() if key.endswith("signed/manifest/2"))
        await swarm.kill("ada")
        ada = await swarm.start("ada")
        ben = await swarm.start("ben")
        swarm.introduce()
        stored = next(data for key, data in ada.tools.journal.scan().items() if key.endswith("signed/manifest/2"))
        assert stored == manifest
        await swarm.wait(lambda: verdicts(ada).get(2) in COUNTED, "verdict on the journalled update")
        assert 2 not in ada.trainer.trained_rounds
        await swarm.wait(lambda: 3 in ada.trainer.trained_rounds, "training of the next round")
        assert ben.round >= 2


async def test_blob_of_the_state_that_was_damaged_on_disk_is_fetched_again(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(2)
        node = swarm.nodes["cleo"]
        await swarm.kill("cleo")
        part = node.driver.machine.head.parts[0]
        path = next((swarm.data_dir("cleo") / "blobs" / "whole").glob(f"*/{part.hex()}"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        cleo = await swarm.start("cleo")
        assert f"{part.hex()} was damaged" in cleo.notes
        swarm.introduce()
        await swarm.wait_round(cleo.round + 2)


@pytest.mark.parametrize("request_type", [LoadStart, Train, Publish])
async def test_trainer_that_fails_costs_one_update_and_no_round(tmp_path: Path, request_type: type) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        _, ben, _ = await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(2)
        ben.trainer.fail_next[request_type] = TrainerError("the trainer process died: ended by SIGKILL")
        await swarm.wait(lambda: request_type not in ben.trainer.fail_next, "failure of the trainer")
        failed = ben.round
        await swarm.wait_round(failed + 3)
        assert any("no update" in note for note in ben.notes)

        def counts_again() -> bool:
            return any(verdicts(ben).get(number) in COUNTED for number in range(failed + 2, ben.round + 1))

        await swarm.wait(counts_again, "update after the failure that counts")


async def test_full_disk_of_the_trainer_ends_the_node_with_its_cause(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        _, ben, _ = await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(1)
        ben.trainer.fail_next[Publish] = MachineError("disk full: cannot write in trainer")
        await asyncio.wait([ben.running], timeout=WAIT_S)
        with pytest.raises(MachineError, match="disk full"):
            ben.running.result()
        assert max(ben.history()) == ben.round


async def test_full_disk_of_the_journal_ends_the_node_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(entries: object) -> None:
        raise MachineError("disk full: cannot write in journal")

    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(FOUNDERS)
        ada = await swarm.start("ada")
        monkeypatch.setattr(ada.tools.journal, "put", full)
        await asyncio.wait([ada.running], timeout=WAIT_S)
        with pytest.raises(MachineError, match="disk full"):
            ada.running.result()
        assert ada.driver.tally.messages_sent == 0
        with pytest.raises(RemoteProtocolError, match="ending"):
            await ada.driver.receive(swarm.identity("ben").peer_id, b"")


async def test_leaver_hands_its_masters_over_and_ends(tmp_path: Path) -> None:
    # masters fit what was published only if the leaver's last update came in time
    async with node_swarm(tmp_path / "swarm", patient_run()) as swarm:
        founders = await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(3)
        state = founders[0].driver.machine.head.state
        # the keys decide who owns what: a shard with two owners has no heir that needs its masters
        sole = next(state.owners(shard)[0] for shard in range(4) if len(state.owners(shard)) == 1)
        leaver = next(node for node in founders if swarm.identity(node.name).peer_id == sole)
        await leave(leaver, LeaveWish(tmp_path), await budgets(tmp_path))
        await swarm.wait(leaver.running.done, "end of the leaver")
        assert leaver.running.exception() is None
        await swarm.wait_round(leaver.round + 2)
        others = [name for name in FOUNDERS if name != leaver.name]
        for name in others:
            state = swarm.nodes[name].driver.machine.head.state
            assert state.row(sole) is None
            assert all(state.owners(shard) for shard in range(4))

        def is_taken_over() -> bool:
            return any("took over shard" in note for name in others for note in swarm.nodes[name].notes)

        await swarm.wait(is_taken_over, "masters at an heir")  # a trainer takes them when it has its start


@pytest.mark.parametrize("left_bytes", [0, 900_000])
async def test_a_leaver_promises_nothing_that_its_months_bytes_do_not_allow(tmp_path: Path, left_bytes: int) -> None:
    """Neither when they are used up, nor when fewer are left than the hand-over needs beside the rounds until then."""
    async with node_swarm(tmp_path / "swarm", patient_run()) as swarm:
        founders = await start_founders(swarm, FOUNDERS)
        await swarm.wait_round(2)
        leaver = next(node for node in founders if node.tools.training.owned)
        shards = leaver.tools.training.owned
        count = MonthCount(month=month_of(date.today()), up_bytes=100_000_000 - left_bytes, down_bytes=0)
        write_month(tmp_path, count)
        wish, given = LeaveWish(tmp_path), []
        give = leaver.driver.give
        leaver.driver.give = lambda event: (given.append(event), give(event))[1]  # type: ignore[method-assign]  # noted
        await leave(leaver, wish, await budgets(tmp_path, Limits(monthly=100_000_000)))
        assert fx.LeaveWanted(handover=None, handover_bytes=0) in given
        assert wish.handover_bytes == 0
        assert wish.given_up.startswith("900 kB are left" if left_bytes else "this month's 100 MB are used up")
        (said,) = [note for note in leaver.notes if "nothing is handed over" in note]
        assert all(str(shard) in said for shard in shards) and "certified values stay in the swarm" in said
        await swarm.wait(leaver.running.done, "end of the leaver")
        assert leaver.running.exception() is None
        others = [name for name in FOUNDERS if name != leaver.name]
        await swarm.wait_round(leaver.round + 2, others)
        for name in others:
            state = swarm.nodes[name].driver.machine.head.state
            assert state.row(swarm.identity(leaver.name).peer_id) is None
            assert all(state.owners(shard) for shard in range(4)), "the new owners go on from the certified values"
            assert not any("hand-over" in note or "took over" in note for note in swarm.nodes[name].notes)


async def test_the_only_member_leaves_at_once(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        (ada,) = await start_founders(swarm, ["ada"])
        await swarm.wait_round(2)
        await leave(ada, LeaveWish(tmp_path), await budgets(tmp_path))
        await swarm.wait(ada.running.done, "end of the only member")
        assert ada.running.exception() is None


async def test_message_after_the_end_is_answered_and_not_kept_waiting(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        (ada,) = await start_founders(swarm, ["ada"])
        await swarm.kill("ada")
        with pytest.raises(RemoteProtocolError, match="ending"):
            await asyncio.wait_for(ada.driver.receive(swarm.identity("ben").peer_id, b""), WAIT_S)


async def test_own_input_waits_behind_a_bounded_number_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        (ada,) = await start_founders(swarm, ["ada"])
        stranger, own = swarm.identity("ben").peer_id, fx.PeersKnown(peers=())
        handle = ada.driver.machine.handle
        handled: list[fx.Input] = []

        def noted(event: fx.Input, now_ms: int) -> list[fx.Effect]:
            handled.append(event)
            return handle(event, now_ms)

        monkeypatch.setattr(ada.driver.machine, "handle", noted)
        sends = [asyncio.ensure_future(ada.driver.receive(stranger, b"")) for _ in range(3 * MAX_WAITING)]
        await asyncio.sleep(0)
        ada.driver.give(own)
        answers = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), WAIT_S)
        assert all(isinstance(answer, RemoteProtocolError) for answer in answers)
        assert sum(isinstance(event, fx.Received) for event in handled) == 3 * MAX_WAITING
        before = handled[: next(place for place, event in enumerate(handled) if event is own)]
        assert 0 < sum(isinstance(event, fx.Received) for event in before) <= MAX_WAITING


async def test_machine_that_cannot_do_what_is_due_is_asked_again_and_the_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        (ada,) = await start_founders(swarm, ["ada"])
        stranger = swarm.identity("ben").peer_id
        handle, is_stuck = ada.driver.machine.handle, True
        num_ticks = 0

        def stuck(event: fx.Input, now_ms: int) -> list[fx.Effect]:
            nonlocal num_ticks
            num_ticks += isinstance(event, fx.Tick)
            if is_stuck and isinstance(event, fx.Received | fx.Tick):
                raise RemoteProtocolError(None, "nonsense that was taken in")
            return handle(event, now_ms)

        monkeypatch.setattr(ada.driver.machine, "handle", stuck)
        stuck_at_ms = ada.tools.clock.now_ms()
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="nonsense"):
                await ada.driver.receive(stranger, b"")
        assert ada.driver.tally.messages_refused >= 4
        told = [note for note in ada.notes if "is held up by a message: nonsense that was taken in" in note]
        assert len(told) == 1
        for _ in range(200):
            await asyncio.sleep(0)
        num_rests = (ada.tools.clock.now_ms() - stuck_at_ms) // _REST_MS
        assert num_ticks < 10 + 2 * num_rests  # it does not spin
        is_stuck = False
        await swarm.wait_round(ada.round + 1)


async def test_senders_that_wait_are_answered_at_the_end(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        (ada,) = await start_founders(swarm, ["ada"])
        stranger = swarm.identity("ben").peer_id
        sends = [asyncio.ensure_future(ada.driver.receive(stranger, b"")) for _ in range(3 * MAX_WAITING)]
        await asyncio.sleep(0)
        await swarm.kill("ada")
        answers = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), WAIT_S)
        assert all(isinstance(answer, RemoteProtocolError) for answer in answers)


async def test_identity_in_use_is_believed_from_an_honest_member_only(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        ada, *_ = await start_founders(swarm, FOUNDERS)
        stranger = swarm.identity("eve").peer_id
        ada.driver.identity_reported(stranger, IdentityError("identity in use: by a stranger"))
        await swarm.wait_round(1)
        assert not ada.running.done()
        ada.driver.identity_reported(swarm.identity("ben").peer_id, IdentityError("identity in use: twice"))
        await asyncio.wait([ada.running], timeout=WAIT_S)
        with pytest.raises(IdentityError, match="twice"):
            ada.running.result()
