"""A node whose machine sleeps in the middle of a round, with all its processes, and wakes up rounds later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.testing.kills import contradictions
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(540)]

FOUNDERS = ["ada", "ben", "cleo", "dan"]
VICTIM = "dan"
OTHERS = FOUNDERS[:-1]
ROUND_S = 60.0
"""round_max 20 s, T 3 s and the time-outs of views 0 and 1 three times over are 38 s; the machine may be busy."""
REJOIN_S = 90.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """Four founders, so that three go on; every test leaves all four running."""
    with live_swarm(tmp_path_factory.mktemp("swarm"), quick_config()) as swarm:
        swarm.found(FOUNDERS)
        swarm.wait_round(2, FOUNDERS, 180)
        yield swarm


@pytest.mark.parametrize("phase", ["publish", "train", "aggregate", "vote"])
def test_round_ends_without_a_frozen_node_which_comes_back_and_publishes_nothing_old(
    swarm: LiveSwarm, phase: str
) -> None:
    victim, told_before = swarm.peer_id(VICTIM), len(swarm.said("ada"))
    assert any(swarm.wait_phase(VICTIM, [phase], 20) for _ in range(3))
    swarm.freeze(VICTIM)
    frozen_at_s, frozen_in = time.monotonic(), max(swarm.certified(name) for name in OTHERS) + 1
    swarm.wait_round(frozen_in, OTHERS, ROUND_S)
    assert time.monotonic() - frozen_at_s < ROUND_S

    # long enough that an update of its round is too late even as a late one
    swarm.wait_round(frozen_in + LATE_ROUNDS + 1, OTHERS, 3 * ROUND_S)
    told = swarm.said("ada")[told_before:]
    assert any("went on without" in line and f"…{victim[-8:]}" in line for line in told.splitlines())

    woken_in = max(swarm.certified(name) for name in OTHERS)
    swarm.thaw(VICTIM)
    swarm.wait_member(VICTIM, woken_in + 1, REJOIN_S)

    def counts_again() -> bool:
        return any(base > woken_in for base in swarm.accepted_bases("ada", victim).values())

    swarm.wait(counts_again, REJOIN_S, "accepted update of the node that slept")
    bases = swarm.accepted_bases("ada", victim)
    assert [base for base in bases.values() if frozen_in < base <= woken_in] == []
    assert all(number - base <= LATE_ROUNDS for number, base in bases.items())
    assert contradictions({name: swarm.finals(name) for name in FOUNDERS}) == set()
