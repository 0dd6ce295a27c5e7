"""Claim: a user interface that looks on costs a node under 2 % of a core, four snapshots a second.

Ours: the node's side of the local API (`spes_p2p.node.control`) over real HTTP on loopback: a snapshot made from the
parts of a running node by the node's own `View`, encoded and sent to a client in another process, which decodes it as
the terminal UI does. The run has the shape of a large one: 64 members, 256 expert shards, 400 points of the loss curve.
Processor time is counted in the serving process alone, against the same process with nobody looking on.
Peer: the same snapshots asked for one by one (`GET /snapshot`, a connection each), as a poller would.

    python benchmarks/stream.py [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from spes_p2p.crypto import verify
from spes_p2p.ids import PeerId
from spes_p2p.node.control import MIN_GAP_S, serve_control
from spes_p2p.node.driver import Tally
from spes_p2p.node.errands import Tally as ErrandTally
from spes_p2p.node.log import NodeLog
from spes_p2p.node.machine import MachineWatch
from spes_p2p.node.snapshot import LimitsView, LogEvent, NodeSnapshot
from spes_p2p.node.view import TrainerWatch, View
from spes_p2p.node.worker_messages import Progress
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing.protocol_cases import identities, owned_head, quick_config

MEMBERS = 64
SHARDS = 256
CURVE_POINTS = 400
CHANGES_PER_S = 20
"""A node in the middle of a round changes more often than it is shown."""
TARGET = 0.02

LOOK_ON = """
import asyncio, sys
from pathlib import Path
from spes_p2p.node import control_client
from spes_p2p.node.snapshot import NodeSnapshot

async def look_on():
    print("ready", flush=True)
    count = 0
    try:
        async with asyncio.timeout(float(sys.argv[2])):
            async for update in control_client.stream(Path(sys.argv[1])):
                count += isinstance(update, NodeSnapshot)
    except TimeoutError:
        pass
    print(count, flush=True)

asyncio.run(look_on())
"""
POLL = """
import sys, time
from pathlib import Path
from spes_p2p.node.control_client import read_snapshot

print("ready", flush=True)
until, count = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < until:
    read_snapshot(Path(sys.argv[1]))
    count += 1
    time.sleep(float(sys.argv[3]))
print(count, flush=True)
"""


class Lines:
    """No network."""

    def bytes_sent(self) -> int:
        return 12_000_000

    def bytes_received(self) -> int:
        return 34_000_000

    def is_connected(self, peer: PeerId) -> bool:
        return True

    def latency_ms(self, peer: PeerId) -> float | None:
        return 12.0

    def route(self, peer: PeerId) -> str:
        return "tcp"


@dataclass
class StillDriver:
    """What the view looks at of a driver, around a real machine that nothing drives."""

    machine: RoundMachine
    tally: Tally = field(default_factory=Tally)
    loaded: None = None
    errands: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tally=ErrandTally()))
    rounds: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_published=0))


class Looked:
    """A node's handle with a real machine and view behind it, and no network, trainer or disk."""

    def __init__(self) -> None:
        config = quick_config()
        config = config.model_copy(update={"model": config.model.model_copy(update={"num_experts": SHARDS})})
        founders = identities(MEMBERS)
        head = owned_head(founders, config, capacity=SHARDS // MEMBERS)
        me = founders[0]
        machine = RoundMachine(head, me, verify, Wishes(capacity=4, private_seed=b"x"), now_ms=0)
        machine.start(0)
        self._log = NodeLog()
        driver: Any = StillDriver(machine)
        self._view = View(
            run_name="large",
            run_id="ab" * 32,
            peer=me.peer_id,
            machine=MachineWatch(("cpu",)),
            began_s=time.monotonic(),
            transport=Lines(),
            addresses=("/ip4/127.0.0.1/tcp/1",),
            watch=TrainerWatch(self._log.tell),
            is_leaving=lambda: False,
            driver=driver,
        )
        for step in range(CURVE_POINTS):
            self.step(step)

    def step(self, number: int) -> None:
        """An inner step is done."""
        self._view.watch.progress(
            Progress(
                local_step=number % 40,
                num_inner_steps=40,
                global_step=number,
                loss=2.0 + number / 1e4,
                tokens=32,
                tokens_per_s=100.0,
                num_skipped=0,
            )
        )
        self._log.changed()

    def snapshot(self) -> NodeSnapshot:
        return self._view.snapshot(int(time.monotonic() * 1000))

    def events(self, after: int) -> tuple[LogEvent, ...]:
        return self._log.after(after)

    async def wait_change(self, after: int, timeout_s: float) -> None:
        await self._log.wait(after, timeout_s)

    def set_hold(self, reason: str, held: bool) -> None:
        """Nothing trains here."""

    def request_leave(self) -> None:
        """Nobody asks."""

    async def change_limits(self, changes: Mapping[str, str]) -> LimitsView:
        raise AssertionError("not asked for")

    def request_recovery(self) -> None:
        """Nobody asks."""

    def request_stop(self, *, keep_wish: bool = False) -> None:
        """Nobody asks."""


async def changing(handle: Looked, seconds: float) -> None:
    """The node's own life for so long, as seen from outside: something changes, again and again."""
    for number in range(round(seconds * CHANGES_PER_S)):
        handle.step(CURVE_POINTS + number)
        await asyncio.sleep(1 / CHANGES_PER_S)


async def alone(seconds: float) -> float:
    """Share of a core without anybody who looks on."""
    handle = Looked()
    began, began_cpu = time.perf_counter(), time.process_time()
    await changing(handle, seconds)
    return (time.process_time() - began_cpu) / (time.perf_counter() - began)


async def looked_at(program: str, seconds: float) -> tuple[float, float]:
    """(share of a core, snapshots a second) while one client looks on."""
    handle = Looked()
    with tempfile.TemporaryDirectory() as folder:
        async with serve_control(handle, Path(folder)):
            arguments = [folder, str(seconds), str(MIN_GAP_S)]
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE
            )
            if client.stdout is None:
                raise SystemExit("the client has no output")
            await client.stdout.readline()  # it has started
            began, began_cpu = time.perf_counter(), time.process_time()
            await changing(handle, seconds)
            elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            count = int(await client.stdout.readline())
            await client.wait()
    return cpu_s / elapsed_s, count / elapsed_s


def measure(seconds: float) -> list[dict[str, object]]:
    """The table."""
    nobody = asyncio.run(alone(seconds))
    stream, stream_rate = asyncio.run(looked_at(LOOK_ON, seconds))
    poll, poll_rate = asyncio.run(looked_at(POLL, seconds))
    size = len(msgspec.json.encode(Looked().snapshot()))
    print(f"a snapshot has {size / 1024:.0f} KiB; with nobody looking on {100 * nobody:.2f} % of a core")
    print(f"stream: {stream_rate:.1f} a second; poll: {poll_rate:.1f} a second")
    ours, peer = (max(0.0, share - nobody) / rate for share, rate in ((stream, stream_rate), (poll, poll_rate)))
    return [
        {
            "name": "share of a core at 4 snapshots a second",
            "ours": round(4 * ours, 4),
            "peer": round(4 * peer, 4),
            "ratio": round(ours / peer, 3),
            "better": "lower",
            "target": round(TARGET / (4 * peer), 2),
        }
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.seconds)
    print(f"{f'{MEMBERS} members, {SHARDS} shards':<42} {'ours':>8} {'poll':>8} {'ratio':>6} {'target':>7}")
    for one in rows:
        print(f"{one['name']:<42} {one['ours']:>8} {one['peer']:>8} {one['ratio']:>6} {one['target']:>7}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
