"""Snapshots of a running node: right at every stage, and cheap."""

from __future__ import annotations

import time
from pathlib import Path

from spes_p2p.crypto import peer_text
from spes_p2p.ids import PeerId
from spes_p2p.node.machine import MachineWatch
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.node.view import TrainerWatch, View
from spes_p2p.node.worker import Restarting
from spes_p2p.node.worker_messages import Progress
from spes_p2p.testing.nodes import NodeSwarm, node_swarm

BUDGET_S = 0.005
"""Four a second at under 2 % of a core."""


class Lines:
    def bytes_sent(self) -> int:
        return 10

    def bytes_received(self) -> int:
        return 20

    def is_connected(self, peer: PeerId) -> bool:
        return False

    def latency_ms(self, peer: PeerId) -> float | None:
        return 12.5

    def route(self, peer: PeerId) -> str:
        return "tcp"


def progress(global_step: int, loss: float = 2.0) -> Progress:
    return Progress(
        local_step=global_step % 3 + 1, num_inner_steps=3, global_step=global_step, loss=loss, tokens=32,
        tokens_per_s=100.0, num_skipped=0,
    )  # fmt: skip


def view_of(swarm: NodeSwarm, name: str) -> View:
    return View(
        run_name="tiny",
        run_id="ab",
        peer=swarm.identity(name).peer_id,
        machine=MachineWatch(("cpu",)),
        began_s=time.monotonic(),
        transport=Lines(),
        addresses=("/ip4/127.0.0.1/tcp/1",),
        watch=TrainerWatch(lambda level, text: None),
        is_leaving=lambda: False,
        waiting_for="the run's manifest from its peers",
    )


async def test_snapshot_before_the_machine_says_what_the_start_waits_for(tmp_path: Path) -> None:
    snapshot = view_of(NodeSwarm(tmp_path, None), "ada").snapshot(0)
    assert (snapshot.round.phase, snapshot.round.waiting_for) == ("load", "the run's manifest from its peers")
    assert not snapshot.member
    assert snapshot.shards == ()


async def test_snapshot_is_right_while_the_node_runs_and_after_it_has_ended(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada", "ben"])
        ada = await swarm.start("ada")
        await swarm.start("ben")
        swarm.introduce()
        view = view_of(swarm, "ada")
        view.driver, view.sync = ada.driver, ada.tools.sync
        seen: list[NodeSnapshot] = []

        def look() -> bool:
            seen.append(view.snapshot(ada.tools.clock.now_ms()))
            return seen[-1].counters.rounds_adopted >= 3

        await swarm.wait(look, "third round")
        await swarm.kill("ada")
        last = view.snapshot(ada.tools.clock.now_ms())
    assert last.psi_digest == ada.driver.machine.head.psi_digest.hex()
    assert 3 <= last.counters.rounds_adopted <= last.certified_round
    assert last.learning.tokens_total > 0
    assert {peer.peer for peer in last.network.peers if peer.me} == {peer_text(view.peer)}
    assert {phase.progress <= 1.0 for shot in seen for phase in shot.round.phases} == {True}
    assert {"load", "train"} <= {shot.round.phase for shot in seen}
    waits = {shot.round.waiting_for for shot in seen if shot.round.phase == "train"}
    assert waits <= {"the trainer to load the state of the run", "the first training steps"}


async def test_four_snapshots_a_second_cost_less_than_two_percent_of_a_core(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada"])
        ada = await swarm.start("ada")
        await swarm.wait_round(2)
        view = view_of(swarm, "ada")
        view.driver, view.sync = ada.driver, ada.tools.sync
        for step in range(400):
            view.watch.progress(progress(step))
        view.snapshot(ada.tools.clock.now_ms())
        began = time.thread_time()
        for _ in range(20):
            view.snapshot(ada.tools.clock.now_ms())
        assert (time.thread_time() - began) / 20 < BUDGET_S


async def test_progress_of_the_round_before_is_not_shown_for_this_one(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada"])
        ada = await swarm.start("ada")
        await swarm.wait_round(2)
        view = view_of(swarm, "ada")
        view.driver, view.sync = ada.driver, ada.tools.sync
        await swarm.kill("ada")
        begun_at = ada.driver.machine.head.global_step
        view.watch.progress(progress(begun_at - 1))
        assert view.snapshot(ada.tools.clock.now_ms()).learning.inner_step == 0
        view.watch.progress(progress(begun_at))
        assert view.snapshot(ada.tools.clock.now_ms()).learning.inner_step == begun_at % 3 + 1


def test_losses_that_are_not_finite_stay_out_of_the_curve_and_restarts_are_told() -> None:
    notes: list[str] = []
    watch = TrainerWatch(lambda level, text: notes.append(f"{level}: {text}"))
    watch.progress(progress(1, float("nan")))
    watch.progress(progress(2, 1.5))
    watch.restarting(Restarting(reason="ended by SIGKILL", restarts=2))
    assert list(watch.curve) == [(2, 1.5)]
    assert watch.restarts == 2
    assert notes == ["error: the trainer process died and is started again: ended by SIGKILL"]
