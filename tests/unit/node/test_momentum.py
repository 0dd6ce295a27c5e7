"""A run with momentum of psi: every node keeps it, gets it, and averages with it, whatever happened to that node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spes_p2p.config import OuterConfig, RunConfig
from spes_p2p.digests import blob_id
from spes_p2p.errors import NotFiniteError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.node.work import Work
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import bits, decode_certificate
from spes_p2p.protocol.effects import Aggregate
from spes_p2p.testing.nodes import SwarmNode, node_swarm, swift_run
from spes_p2p.training.arrays import F32
from spes_p2p.training.layout import part_from_bytes, psi_layout

FOUNDERS = ["ada", "ben", "cleo"]
OUTER = OuterConfig(rule="nesterov")


def nesterov_run() -> RunConfig:
    run = swift_run()
    return run.model_copy(update={"training": run.training.model_copy(update={"outer": OUTER})})


CONFIG = nesterov_run()
LAYOUT = psi_layout(CONFIG)


def body_of(node: SwarmNode, number: int) -> Body:
    (entry,) = node.tools.ledger.range(RoundNumber(number), RoundNumber(number))
    return decode_certificate(entry.certificate).body


def kept_parts(node: SwarmNode, number: int) -> list[int]:
    return list(bits(body_of(node, number).kept, LAYOUT.num_parts))


def newest_whole(node: SwarmNode) -> int:
    """The newest round whose certificate and parts, and those of the round before, are on the node's disk; 0: none."""
    rounds = sorted(node.history(), reverse=True)

    def is_here(number: int) -> bool:
        return number in rounds and all(node.tools.blobs.has(part) for part in body_of(node, number).parts)

    return next((number for number in rounds[:3] if is_here(number) and is_here(number - 1)), 0)


def state_of(node: SwarmNode, number: int) -> tuple[F32, F32]:
    """psi and its momentum after a round, from the node's own disk; the blobs of three rounds are there."""
    states = []
    for part, blob in enumerate(body_of(node, number).parts):
        data = bytes(node.tools.blobs.read(blob))
        assert blob_id(data) == blob
        states.append(part_from_bytes(LAYOUT, part, data))
    momenta = [state.momentum for state in states if state.momentum is not None]
    return np.concatenate([state.psi for state in states]), np.concatenate(momenta)


def assert_one_step_of_nesterov(before: tuple[F32, F32], after: tuple[F32, F32], parts: list[int]) -> None:
    """What the rule has of psi follows from the momenta before and after: their mean delta is m' - mu m."""
    for part in parts:
        where = LAYOUT.part_slice(part)
        psi, momentum = before[0][where].astype(np.float64), before[1][where].astype(np.float64)
        new_psi, new_momentum = after[0][where].astype(np.float64), after[1][where].astype(np.float64)
        mean = new_momentum - OUTER.momentum * momentum
        assert np.abs(mean).max() > 1e-4
        expected = psi + OUTER.learning_rate * (mean + OUTER.momentum * new_momentum)
        np.testing.assert_allclose(new_psi, expected, atol=1e-6)


async def test_a_late_joiner_and_a_node_that_was_killed_have_the_momentum_of_all(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        swarm.create(FOUNDERS)
        for name in FOUNDERS:
            await swarm.start(name)
        swarm.introduce()
        await swarm.wait_round(3)
        dan = await swarm.start("dan", manifest_from="ada")
        swarm.introduce()
        await swarm.wait(lambda: dan.driver.errands.tally.parts_aggregated > 0, "a part averaged by the joiner")
        await swarm.kill("ben")
        ben = await swarm.start("ben")
        swarm.introduce()
        await swarm.wait(lambda: ben.driver.errands.tally.parts_aggregated > 0, "a part averaged after the restart")
        reached, nodes = max(node.round for node in swarm.nodes.values()), list(swarm.nodes.values())

        def all_have_stepped() -> bool:
            newest = {newest_whole(node) for node in nodes}
            return len(newest) == 1 and min(newest) > reached and not kept_parts(dan, min(newest))

        await swarm.wait(all_have_stepped, "a round that moved every part, on every disk")
        number = newest_whole(dan)
        before, after = state_of(dan, number - 1), state_of(dan, number)
        for node in nodes:
            psi, momentum = state_of(node, number)
            assert (psi.tobytes(), momentum.tobytes()) == (after[0].tobytes(), after[1].tobytes())
        assert_one_step_of_nesterov(before, after, [0, 1, 2])


async def test_a_kept_part_keeps_its_momentum_and_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, average = [False], Work.aggregate

    def aggregate(self: Work, effect: Aggregate) -> Digest:
        if fails[0] and effect.part == 1:
            raise NotFiniteError("part of psi: not finite")
        return average(self, effect)

    monkeypatch.setattr(Work, "aggregate", aggregate)
    async with node_swarm(tmp_path / "swarm", CONFIG) as swarm:
        swarm.create(FOUNDERS)
        for name in FOUNDERS:
            await swarm.start(name)
        swarm.introduce()
        await swarm.wait_round(2)
        ada = swarm.nodes["ada"]
        fails[0] = True

        def is_kept() -> bool:
            number = newest_whole(ada)
            return number > 2 and kept_parts(ada, number) == [1]

        await swarm.wait(is_kept, "a round that kept the part")
        fails[0] = False
        number = newest_whole(ada)
        before, kept = state_of(ada, number - 1), state_of(ada, number)
        where = LAYOUT.part_slice(1)
        assert body_of(ada, number).parts[1] == body_of(ada, number - 1).parts[1]
        assert np.abs(kept[1][where]).max() > 1e-4
        assert_one_step_of_nesterov(before, kept, [0, 2])
        await swarm.wait(lambda: newest_whole(ada) > number and not kept_parts(ada, newest_whole(ada)), "a whole step")
        later = newest_whole(ada)
        assert_one_step_of_nesterov(state_of(ada, later - 1), state_of(ada, later), [1])
