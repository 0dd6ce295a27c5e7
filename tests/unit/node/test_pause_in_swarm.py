"""A pause among nodes that go on: nobody waits for the paused one, its shards pass on in time, and it comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spes_p2p.node.holds import PAUSE
from spes_p2p.testing.nodes import SwarmNode, node_swarm, patient_run

CONFIG = patient_run()


def owned(node: SwarmNode) -> tuple[int, ...]:
    """Shards of a node, as the node itself sees it."""
    return node.driver.machine.head.state.shards_of(node.driver.machine._signer.peer_id)


async def test_paused_node_stays_a_member_passes_its_shards_on_and_trains_again_when_resumed(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        swarm.create(["ada", "ben", "cleo"])
        ada, ben, _ = [await swarm.start(name) for name in ("ada", "ben", "cleo")]
        swarm.introduce()
        await swarm.wait_round(2)
        assert owned(ada)
        ada.tools.holds.set(PAUSE, True)
        paused_in = ada.round
        await swarm.wait_round(paused_in + 1)
        view = ada.driver.pause()
        assert view is not None and view.lease_ends_round is not None
        assert view.shards
        await swarm.wait_round(view.lease_ends_round + 1)
        row = ben.driver.machine.head.state.row(swarm.identity("ada").peer_id)
        assert row is not None and row.voter_since is not None
        assert not owned(ada)
        assert any("longer than the lease lasts" in note for note in ada.notes)
        assert all(number <= paused_in + 1 for number in ada.trainer.trained_rounds)
        # ada says that nothing will come as soon as another has published: its grace is never waited for
        assert ben.driver.pace.round_ms is not None
        assert ben.driver.pace.round_ms < CONFIG.protocol.train_grace_ms

        ada.tools.holds.set(PAUSE, False)
        resumed_in = ada.round
        await swarm.wait(
            lambda: any(update.round > resumed_in and update.verdict == "accepted"
                        for update in ada.tools.sync.updates.latest(9)),
            "accepted update of the node that was paused",
        )  # fmt: skip
        await swarm.wait(lambda: bool(owned(ada)), "shard of the node that was paused")


async def test_rounds_of_a_run_whose_only_member_is_paused_do_not_chase_each_other(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        swarm.create(["ada"])
        ada = await swarm.start("ada")
        await swarm.wait_round(2)
        ada.tools.holds.set(PAUSE, True)
        async with asyncio.timeout(60):
            while not ada.driver.rounds.is_held_back:
                await asyncio.sleep(0)
        held_in = ada.driver.machine.terms.round
        assert ada.driver.machine.progress(ada.tools.clock.now_ms()).phase == "train"
        view = ada.driver.pause()
        assert view is not None and view.lease_ends_round is not None
        ada.tools.is_leaving = lambda: True
        view = ada.driver.pause()
        assert view is not None and (view.lease_ends_round, view.reason) == (None, "")  # nothing to be kept any more
        ada.tools.is_leaving = lambda: False
        ada.tools.holds.set(PAUSE, False)
        await swarm.wait_round(held_in)
        assert held_in in ada.trainer.trained_rounds  # the short pause cost no round
