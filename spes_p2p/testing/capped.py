"""A swarm of three real nodes, one of them with an upload cap, and what its daemon sends while rounds go on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import psutil

from spes_p2p.errors import SpesError
from spes_p2p.testing.live import LiveSwarm, live_swarm, quick_config
from spes_p2p.testing.rates import Samples, watch_sent, window_rates

CAPPED, OTHERS = "ada", ("ben", "cleo")
WINDOW_S = 10.0
_ROUND_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRun:
    """What was measured."""

    cap_bytes_per_s: int
    rounds: int
    """Certified while it was measured."""
    seconds: float
    sent_bytes: int
    rates: tuple[float, ...]
    """Bytes per second over every window of WINDOW_S, as the kernel counted what the capped node's daemon sent."""
    updates_accepted: int
    """Of the capped node."""
    limits: str
    """What `spes-p2p limits --json` of the capped node said at the end."""

    @property
    def most(self) -> float:
        """Of the busiest window, in shares of the cap."""
        return max(self.rates) / self.cap_bytes_per_s

    @property
    def share_near_cap(self) -> float:
        """Share of the windows with at least nine tenths of the cap: how much of the time the cap was what limited."""
        return sum(rate >= 0.9 * self.cap_bytes_per_s for rate in self.rates) / len(self.rates)


def run_capped(folder: Path, cap_bytes_per_s: int, rounds: int) -> CappedRun:
    """Train so many rounds of a model of 25 MB of experts, from the capped node's first training on."""
    config = quick_config(min_rate_bytes_per_s=500_000, round_max_ms=60_000)
    model = config.model.model_copy(update={"width": 128, "expert_width": 2048})
    config = config.model_copy(update={"model": model})
    with live_swarm(folder, config) as swarm:
        names = (CAPPED, *OTHERS)
        swarm.found(names, options={CAPPED: ("--upload", f"{cap_bytes_per_s / 1e6}MB/s")})
        swarm.wait_round(1, names, _ROUND_S)
        samples, first, last = asyncio.run(_watch(swarm, rounds))
        snapshot = swarm.look(CAPPED)
        accepted = sum(update.verdict.startswith("accepted") for update in snapshot.learning.updates) if snapshot else 0
        limits = swarm.output("limits", "--json", "--data-dir", str(swarm.data_dir(CAPPED)))
        return CappedRun(
            cap_bytes_per_s=cap_bytes_per_s,
            rounds=last - first,
            seconds=samples[-1][0] - samples[0][0],
            sent_bytes=samples[-1][1] - samples[0][1],
            rates=tuple(window_rates(samples, WINDOW_S)),
            updates_accepted=accepted,
            limits=json.dumps(json.loads(limits)),
        )


async def _watch(swarm: LiveSwarm, rounds: int) -> tuple[Samples, int, int]:
    first = swarm.certified(CAPPED)
    reached = asyncio.create_task(
        asyncio.to_thread(swarm.wait_round, first + rounds, [CAPPED], rounds * _ROUND_S)  # bounded
    )
    samples = await watch_sent(_daemon_of(swarm.children[CAPPED].pid), reached)
    await reached
    return samples, first, swarm.certified(CAPPED)


def _daemon_of(pid: int) -> int:
    """Process id of the network daemon of a node. Raises SpesError if there is none."""
    for process in psutil.Process(pid).children(recursive=True):
        if process.name().startswith("p2pd"):
            return int(process.pid)
    raise SpesError(f"process {pid} has no network daemon")
