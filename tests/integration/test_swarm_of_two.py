"""Two founders as real processes: one dies, the other goes on tentatively; both are one again; one recovers alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spes_p2p.testing.kills import contradictions
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(900)]

FOUNDERS = ["ada", "ben"]
PATIENCE_S = 10.0
ROUND_S = 60.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    config = quick_config(patience_ms=round(PATIENCE_S * 1000))
    with live_swarm(tmp_path_factory.mktemp("swarm"), config) as swarm:
        swarm.found(FOUNDERS)
        swarm.wait_round(3, FOUNDERS, 180)
        yield swarm


def wait_tentative(swarm: LiveSwarm, name: str, number: int) -> int:
    """Until a node has so many tentative certificates; returns the last final round before them."""
    found = 0

    def reached() -> bool:
        nonlocal found
        snapshot = swarm.look(name)
        found = snapshot.final_round if snapshot is not None else 0
        return snapshot is not None and snapshot.certified_round - snapshot.final_round >= number

    swarm.wait(reached, PATIENCE_S + (number + 1) * ROUND_S, f"{number} tentative rounds of {name}")
    return found


def wait_final(swarm: LiveSwarm, number: int, names: list[str]) -> None:
    def reached() -> bool:
        snapshots = [swarm.look(name) for name in names]
        return all(snapshot is not None and snapshot.final_round >= number for snapshot in snapshots)

    swarm.wait(reached, 3 * ROUND_S, f"final round {number}")


def test_one_of_two_goes_on_tentatively_survives_a_kill_and_both_become_one_again(swarm: LiveSwarm) -> None:
    swarm.kill("ben")
    fork = wait_tentative(swarm, "ada", 2)
    swarm.kill("ada")
    branch = [record for record in swarm.history("ada") if not record.final and record.round > fork]
    assert [record.round for record in branch] == [fork + 1 + place for place in range(len(branch))]
    swarm.restart("ada")
    assert wait_tentative(swarm, "ada", len(branch) + 1) == fork
    went_on_to = swarm.certified("ada")
    swarm.restart("ben")
    wait_final(swarm, went_on_to + 1, FOUNDERS)
    histories = [swarm.history(name) for name in FOUNDERS]
    common = min(map(len, histories))
    digests = [[(record.round, record.psi_digest, record.final) for record in one[:common]] for one in histories]
    assert digests[0] == digests[1]
    tentative = [record for record in histories[0] if not record.final and fork < record.round <= went_on_to]
    assert [record.psi_digest for record in tentative[: len(branch)]] == [record.psi_digest for record in branch]
    assert "certified tentatively" in swarm.said("ada")
    assert contradictions({name: swarm.finals(name) for name in FOUNDERS}) == set()
    for name in FOUNDERS:
        assert "of them tentative" in swarm.output("ledger", "verify", "--data-dir", str(swarm.data_dir(name)))


def test_the_creator_recovers_without_the_other_one_which_joins_again(swarm: LiveSwarm) -> None:
    refused = swarm.command("run", "recover", "--yes", "--data-dir", str(swarm.data_dir("ada")))
    assert (refused.returncode, "this run can go on" in refused.stderr) == (2, True)
    assert "does not hold" in swarm.command("run", "recover", "--data-dir", str(swarm.data_dir("ben"))).stderr
    swarm.kill("ben")
    wait_tentative(swarm, "ada", 1)
    told = swarm.output("run", "recover", "--yes", "--data-dir", str(swarm.data_dir("ada")))
    assert "unsafe under partition" in told
    assert "epoch 1 has begun" in told
    begun = swarm.certified("ada")
    wait_final(swarm, begun + 1, ["ada"])
    assert "recovery: epoch 1 begins" in swarm.output("ledger", "show", "--data-dir", str(swarm.data_dir("ada")))
    swarm.restart("ben")
    swarm.wait_member("ben", begun + 2, 3 * ROUND_S)
    snapshot = swarm.look("ben")
    assert snapshot is not None and (snapshot.epoch, len(snapshot.network.peers)) == (1, 2)
