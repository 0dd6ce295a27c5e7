"""One of four voters changes what it sends and signs it: f = 1, so the other three go on and agree."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spes_p2p.testing.hostile import tamper
from spes_p2p.testing.swarm import SimPeer, Swarm

Make = Callable[..., Swarm]
Peers = Callable[[Swarm], list[SimPeer]]
MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("seed", "rate", "robust"),
    [
        (0, 0.1, "mean"),
        (1, 0.1, "clipped"),
        (2, 0.3, "mean"),
        (3, 0.3, "clipped"),
        (4, 0.7, "mean"),
        (5, 0.7, "clipped"),
    ],
)
def test_three_honest_voters_agree_whatever_the_fourth_signs(
    swarm_of: Make, peers_of: Peers, seed: int, rate: float, robust: str
) -> None:
    swarm = swarm_of(4, seed=seed, robust=robust)
    *honest, liar = peers_of(swarm)
    liar.tampers = tamper(liar.identity, rate, random.Random(seed))
    assert swarm.run_to_round(5, 15 * MINUTE_MS, honest), swarm.problems[-3:]
    evicted = any(liar.peer_id not in head.state.members for head in honest[0].heads)
    assert swarm.problems or evicted  # some of it was refused aloud, or convicted it before that
    fifth = [next(head.hash for head in peer.heads if head.round == 5) for peer in honest]
    assert fifth == fifth[:1] * 3
    for peer in honest:
        for head in peer.heads:
            assert {other.peer_id for other in honest} <= set(head.state.members)
