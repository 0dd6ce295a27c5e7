"""Four nodes on machines of their own (network namespaces), whose cables are pulled and put back.

Only a side with a quorum of voters makes final certificates; whatever the others do meanwhile, they end on its chain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from spes_p2p.testing.kills import contradictions, lost_finals
from spes_p2p.testing.live import quick_config
from spes_p2p.testing.netns import ForbiddenError, Networks, PartedSwarm, networks

pytestmark = [pytest.mark.live_long, pytest.mark.timeout(900)]

LEFT, RIGHT = ["ada", "ben"], ["cleo", "dan"]
FOUNDERS = [*LEFT, *RIGHT]
ROUND_S = 60.0
HEAL_S = 2 * ROUND_S
APART_S = 45.0
"""Longer than a round may last, and than libp2p keeps a silent connection."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Networks]:
    try:
        with networks([*LEFT, "bootstrap"], RIGHT) as made:
            yield made
    except ForbiddenError as error:
        pytest.skip(f"this kernel lets nobody make network namespaces: {error}")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, hosts: Networks) -> Iterator[PartedSwarm]:
    """Every test leaves all four running and connected."""
    swarm = PartedSwarm(tmp_path_factory.mktemp("swarm"), quick_config(), hosts)
    try:
        swarm.found(FOUNDERS)
        swarm.wait_round(3, FOUNDERS, 240)
        yield swarm
    finally:
        swarm.end()


def newest_final(swarm: PartedSwarm, name: str) -> int:
    return max((number for _, number in swarm.finals(name)), default=0)


def wait_final(swarm: PartedSwarm, number: int, names: Sequence[str], limit_s: float) -> None:
    swarm.wait(lambda: all(newest_final(swarm, name) >= number for name in names), limit_s, f"final round {number}")


def wait_healed(swarm: PartedSwarm, number: int) -> float:
    """Until all are members that have adopted that round as final; returns after how many seconds."""
    healed_at_s = time.monotonic()
    for name in FOUNDERS:
        swarm.wait_member(name, number, HEAL_S)
    wait_final(swarm, number, FOUNDERS, HEAL_S)
    return time.monotonic() - healed_at_s


def test_one_that_is_cut_off_waits_and_says_so_while_three_go_on(swarm: PartedSwarm, hosts: Networks) -> None:
    hosts.pull("dan")
    cut_at, told_before = newest_final(swarm, "ada"), len(swarm.said("dan"))
    wait_final(swarm, cut_at + 4, ["ada", "ben", "cleo"], 4 * ROUND_S)

    def says_that_it_waits() -> bool:
        return "other members was reached for" in swarm.said("dan")[told_before:]

    swarm.wait(says_that_it_waits, 120, "word of the node that is cut off")
    alone = swarm.finals("dan")
    assert max(number for _, number in alone) <= cut_at + 1  # one may have been on its way
    hosts.plug_in("dan")
    went_on_to = newest_final(swarm, "ada")
    seconds = wait_healed(swarm, went_on_to + 1)
    print(f"\none of four cut off: back after {seconds:.1f} s, {newest_final(swarm, 'ada') - went_on_to} rounds")
    finals = {name: swarm.finals(name) for name in FOUNDERS}
    assert lost_finals(alone, finals["dan"]) == set()
    assert contradictions(finals) == set()
    dan = swarm.peer_id("dan")

    def counts_again() -> bool:
        return any(base > went_on_to for base in swarm.accepted_bases("ada", dan).values())

    swarm.wait(counts_again, HEAL_S, "accepted update of the node that was cut off")


def test_two_and_two_make_nothing_final_and_go_on_together_after_healing(swarm: PartedSwarm, hosts: Networks) -> None:
    hosts.part()
    cut_at = max(newest_final(swarm, name) for name in FOUNDERS)
    until_s = time.monotonic() + APART_S
    swarm.wait(lambda: time.monotonic() >= until_s, 2 * APART_S, "end of the time apart")
    before = {name: swarm.finals(name) for name in FOUNDERS}
    assert max(number for finals in before.values() for _, number in finals) <= cut_at + 1
    assert contradictions(before) == set()
    hosts.heal()
    seconds = wait_healed(swarm, cut_at + 2)
    print(f"\ntwo and two: final again after {seconds:.1f} s")
    after = {name: swarm.finals(name) for name in FOUNDERS}
    assert contradictions(after) == set()
    assert [lost_finals(before[name], after[name]) for name in FOUNDERS] == [set()] * 4
    wait_final(swarm, cut_at + 4, FOUNDERS, 2 * ROUND_S)
