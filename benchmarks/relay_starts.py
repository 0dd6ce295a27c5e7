"""Claim: in every start of a bootstrap node its relay passes on 4 GiB a connection, and asking it costs less than 1 s.

libp2p's daemon on loopback, started again and again, in three ways in turn: as it comes (all processors for its Go
code), with one, and as `relaying.start_relay` does it, which asks the relay and starts it again while the daemon's
other relay answers (128 KiB). `--busy N` keeps N other processes computing.

    python benchmarks/relay_starts.py [--starts 25] [--busy 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

from spes_p2p.client.output import prepare_json_file, write_json
from spes_p2p.crypto import Identity
from spes_p2p.network import p2p
from spes_p2p.network.p2p import RELAY_LIMITS, Daemon, DaemonOptions
from spes_p2p.network.relaying import limits_of, start_relay

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
AS_IT_COMES, ONE_THREAD, OURS = "as it comes", "one thread", "started until it is right"


def compute() -> None:
    """Keep a processor busy."""
    while True:
        pass


async def start_once(options: DaemonOptions, num_threads: int) -> tuple[bool, float]:
    """(whether the relay is the right one, seconds to start it) of one start with so many threads for Go code."""
    stranger = await Daemon.start(DaemonOptions(identity_path=None, listen=LISTEN))
    usual, p2p.NUM_RELAY_THREADS = p2p.NUM_RELAY_THREADS, num_threads
    began_s = time.monotonic()
    daemon = await Daemon.start(options)
    took_s = time.monotonic() - began_s
    p2p.NUM_RELAY_THREADS = usual
    limits = await limits_of(daemon, stranger)
    await daemon.stop()
    await stranger.stop()
    return limits == RELAY_LIMITS, took_s


async def start_ours(options: DaemonOptions) -> tuple[bool, float]:
    """The same of a start as a bootstrap node makes it."""
    began_s = time.monotonic()
    daemon, limits = await start_relay(options)
    took_s = time.monotonic() - began_s
    await daemon.stop()
    return limits == RELAY_LIMITS, took_s


async def measure(num_starts: int) -> dict[str, list[tuple[bool, float]]]:
    """Way of starting -> what came of each start."""
    found: dict[str, list[tuple[bool, float]]] = {AS_IT_COMES: [], ONE_THREAD: [], OURS: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "identity.key"
        path.write_bytes(Identity.generate().to_libp2p_bytes())
        options = DaemonOptions(identity_path=path, listen=LISTEN, relay_service=True)
        for _ in range(num_starts):
            found[AS_IT_COMES].append(await start_once(options, os.cpu_count() or 1))
            found[ONE_THREAD].append(await start_once(options, 1))
            found[OURS].append(await start_ours(options))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=25, help="of each way")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare_json_file(arguments.json)
    others = [multiprocessing.Process(target=compute, daemon=True) for _ in range(arguments.busy)]
    for other in others:
        other.start()
    try:
        found = asyncio.run(measure(arguments.starts))
    finally:
        for other in others:
            other.kill()
            other.join()
    shares, medians = {}, {}
    for way, starts in found.items():
        times = [took_s for _, took_s in starts]
        shares[way] = sum(is_right for is_right, _ in starts) / len(starts)
        medians[way] = statistics.median(times)
        print(
            f"{way:26} {sum(is_right for is_right, _ in starts)} of {len(starts)} pass on 4 GiB;"
            f" start: median {medians[way]:.2f} s, longest {max(times):.2f} s"
        )
    print(f"{os.cpu_count()} processors, {arguments.busy} busy processes, load {os.getloadavg()[0]:.1f}")
    row = {
        "name": "starts of a bootstrap node after which it relays 4 GiB a connection",
        "ours": round(shares[OURS], 3),
        "peer": round(shares[AS_IT_COMES], 3),
        "ratio": round(shares[OURS] / shares[AS_IT_COMES], 2) if shares[AS_IT_COMES] else None,
        "better": "higher",
        "target": 1.0,
        "starts": arguments.starts,
        "busy": arguments.busy,
        "median_s": round(medians[OURS], 3),
        "median_s_as_it_comes": round(medians[AS_IT_COMES], 3),
    }
    if arguments.json:
        write_json(arguments.json, [row])


if __name__ == "__main__":
    main()
