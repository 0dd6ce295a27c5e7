from collections.abc import Callable

import pytest

from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

MINUTE_MS = 60_000


@pytest.fixture
def swarm_of() -> Callable[..., Swarm]:
    """swarm_of(number of founders, seed=..., line=..., **protocol): a swarm in which nobody has said anything yet."""

    def make(num_founders: int, *, seed: int = 1, line: Line | None = None, **protocol: object) -> Swarm:
        swarm = Swarm(quick_config(**protocol), [f"p{number}" for number in range(num_founders)], seed=seed)
        for peer in swarm.peers.values():
            peer.line = line or Line()
        return swarm

    return make


@pytest.fixture
def peers_of() -> Callable[[Swarm], list[SimPeer]]:
    """All peers of a swarm, in the order in which they entered."""
    return lambda swarm: list(swarm.peers.values())
