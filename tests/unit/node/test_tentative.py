"""Whole nodes in one process while voters are away: tentative rounds, lost branches, healing, recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.ids import RoundNumber
from spes_p2p.node.audit import audit
from spes_p2p.node.history import read_history
from spes_p2p.node.own_updates import BRANCH_LOST
from spes_p2p.node.stored import LAST_ROUND
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import decode_certificate
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.nodes import NodeSwarm, SwarmNode, node_swarm, swift_run

NAMES = ["ada", "ben", "cleo"]
CONFIG = swift_run(patience_ms=1_500, train_grace_ms=500)


async def start(swarm: NodeSwarm, num_founders: int) -> list[SwarmNode]:
    swarm.create(NAMES[:num_founders])
    nodes = [await swarm.start(name) for name in NAMES[:num_founders]]
    swarm.introduce()
    await swarm.wait_round(2)
    return nodes


def tip(node: SwarmNode) -> Head:
    """The newest certificate that is in the ledger."""
    return node.tools.sync.head


async def wait_tentative(swarm: NodeSwarm, node: SwarmNode, number: int) -> None:
    """Until a node has so many tentative certificates after its last final one."""
    await swarm.wait(lambda: tip(node).num_tentative >= number, f"{number} tentative certificates")


async def wait_final(swarm: NodeSwarm, nodes: list[SwarmNode], above: int) -> None:
    """Until all of them have a final certificate of a later round."""
    await swarm.wait(lambda: all(tip(node).last_final.round > above for node in nodes), f"final after {above}")


def first_final_after(node: SwarmNode, number: int) -> bytes:
    """`via` of the first final certificate after a round."""
    entry = next(node.tools.ledger.range(RoundNumber(number + 1), LAST_ROUND))
    return decode_certificate(entry.certificate).body.via


@pytest.mark.parametrize("num_founders", [2, 3])
async def test_the_rest_goes_on_tentatively_and_all_are_one_again_when_the_lost_one_is_back(
    tmp_path: Path, num_founders: int
) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        ada, ben, *_ = await start(swarm, num_founders)
        await swarm.kill("ben")
        await wait_tentative(swarm, ada, 2)
        fork = tip(ada).last_final.round
        assert max(ada.history()) == fork  # final ones only
        progress = ada.driver.machine.progress(ada.tools.clock.now_ms())
        assert (progress.tentative, progress.final_round, progress.waiting) == (True, fork, "")
        ben = await swarm.start("ben")
        swarm.introduce()
        nodes = [ada, ben, *(swarm.nodes[name] for name in NAMES[2:num_founders])]
        await wait_final(swarm, nodes, tip(ada).round)
        assert first_final_after(ada, fork) == first_final_after(ben, fork) != NO_DIGEST
        await swarm.close()
        histories = [read_history(swarm.data_dir(name)) for name in NAMES[:num_founders]]
        common = min(map(len, histories))
        tentative = [record.round for record in histories[0] if not record.final]
        assert tentative[:2] == [fork + 1, fork + 2]
        assert [record.round for record in histories[0]] == list(range(1, len(histories[0]) + 1))
        psi = [[(record.round, record.psi_digest, record.final) for record in one[:common]] for one in histories]
        assert all(one == psi[0] for one in psi)
        found = [audit(swarm.data_dir(name)) for name in NAMES[:num_founders]]
        assert [one.problem for one in found] == [None] * num_founders
        assert all(one.num_tentative >= 2 for one in found)


async def test_a_node_that_restarts_in_the_middle_of_a_branch_goes_on_at_its_tip(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        ada, _ = await start(swarm, 2)
        await swarm.kill("ben")
        await wait_tentative(swarm, ada, 2)
        await swarm.kill("ada")
        # the kill may have come between the ledger's transaction and the rest of the adoption
        before = (tip(ada), ada.driver.machine.head)
        ada = await swarm.start("ada")
        begun = tip(ada)
        assert begun in before and not begun.is_final
        assert begun.branch == ada.driver.machine.head.branch == next(head.branch for head in before if head == begun)
        await wait_tentative(swarm, ada, begun.num_tentative + 1)
        assert tip(ada).branch[: begun.num_tentative] == begun.branch
        # the trainer goes on from its checkpoint: nothing of its own is void
        assert ada.trainer.loads[0].spec.base == begun.hash
        assert "zero" not in [load.residual for load in ada.trainer.loads]


async def test_whoever_leaves_its_branch_has_no_residual_left_and_says_which_updates_are_lost(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        nodes = await start(swarm, 2)
        swarm.cut(["ada"], ["ben"])
        for node in nodes:
            await wait_tentative(swarm, node, 2)
        fork = tip(nodes[0]).last_final.round
        tips = [tip(node) for node in nodes]
        assert tips[0].hash != tips[1].hash
        swarm.network.heal()
        await wait_final(swarm, nodes, max(one.round for one in tips))
        via = first_final_after(nodes[0], fork)
        assert first_final_after(nodes[1], fork) == via != NO_DIGEST
        (loser,) = [node for node in nodes if any("left for a better branch" in note for note in node.notes)]
        # the certificate is in the ledger before its state is fetched and loaded
        await swarm.wait(lambda: "zero" in [load.residual for load in loser.trainer.loads], "the trainer's new start")
        place = [load.residual for load in loser.trainer.loads].index("zero")
        assert loser.trainer.residuals[place] == 0.0
        assert max(loser.trainer.residuals[:place]) > 0.0
        assert loser.trainer.loads[place].masters == {}
        (winner,) = [node for node in nodes if node is not loser]
        assert "zero" not in [load.residual for load in winner.trainer.loads]
        verdicts = {update.verdict for update in loser.tools.sync.updates.latest(64)}
        assert verdicts & {BRANCH_LOST, "accepted late"}
        await swarm.close()
        assert [audit(swarm.data_dir(node.name)).problem for node in nodes] == [None, None]


async def test_the_holder_of_the_key_recovers_and_whoever_was_left_out_joins_again(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        ada, _ = await start(swarm, 2)
        ada.driver.give(fx.RecoverWanted())
        await swarm.wait(lambda: any("this one can" in note for note in ada.notes), "refusal of a recovery")
        await swarm.kill("ben")
        await wait_tentative(swarm, ada, 1)
        me = swarm.identity("ada").peer_id
        progress = ada.driver.machine.progress(ada.tools.clock.now_ms())
        assert progress.recovery is not None and progress.recovery.keeps == (me,)
        ada.driver.give(fx.RecoverWanted())
        await swarm.wait(lambda: any("unsafe if those left out" in note for note in ada.notes), "word of a new epoch")
        await swarm.wait(lambda: tip(ada).epoch == 1, "new epoch in the ledger")
        begun = next(record.round for record in read_history(swarm.data_dir("ada")) if record.epoch == 1)
        await wait_final(swarm, [ada], begun + 1)
        assert tip(ada).state.members == (me,)
        await swarm.kill("ada")
        ada = await swarm.start("ada")
        assert (tip(ada).epoch, tip(ada).last_final.epoch) == (1, 1)
        ben = await swarm.start("ben")
        assert tip(ben).epoch == 1  # it caught up over the recovery
        swarm.introduce()
        await swarm.wait(lambda: len(tip(ben).state.members) == 2, "return of the one left out")
        await swarm.close()
        found = audit(swarm.data_dir("ben"))
        assert (found.problem, found.head.epoch) == (None, 1)
        (record,) = [record for record in read_history(swarm.data_dir("ben")) if record.round == begun]
        assert (record.leader, record.final, record.epoch) == ("", True, 1)
