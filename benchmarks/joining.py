"""Claim: a late joiner checks 200 rounds in under 4 s, 10,000 in under 180 s, and skips 10,000 in under 2 s.

Ours: the node's own way of catching up, with its ledger on disk, from a peer that serves from its ledger; no network in
between. 64 voters, a quorum of 43 real Ed25519 signatures a certificate, 64 expert shards that all change every round,
and a voter replaced every 16 rounds. Peer: the same certificates verified one signature after another on one processor,
with nothing stored and nothing served, measured over 200 and taken in proportion. The chain is made once, before.

    python benchmarks/joining.py [--rounds 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random

from spes_p2p.crypto import verify
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.resume import resume
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.certificate import verify_checks
from spes_p2p.protocol.chain import links
from spes_p2p.protocol.codec import decode_certificate
from spes_p2p.protocol.head import Head
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.swarm import identity_of

VOTERS = 64
SHARDS = 64
PARTS = 64
TURNOVER_EVERY = 16
SHORT_ROUNDS, SHORT_TARGET_S = 200, 4.0
LONG_TARGET_S = 180.0
SKIP_TARGET_S = 2.0


def make(num_rounds: int) -> MadeChain:
    """The chain, and what it took."""
    config = quick_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_experts": SHARDS})})
    began = time.perf_counter()
    chain = made_chain(VOTERS, config, PARTS, TURNOVER_EVERY).grow(num_rounds)
    kib = sum(map(len, chain.certificates)) / num_rounds / 1024
    print(f"{num_rounds:,} certificates of {kib:.1f} KiB made in {time.perf_counter() - began:.0f} s")
    return chain


async def catch_up(folder: Path, chain: MadeChain, num_rounds: int, skip_rounds: int) -> float:
    """Seconds until a joiner's ledger is at the tip."""
    serving = Ledger(folder / "serving.sqlite")
    head: Head = chain.genesis
    for first in range(0, num_rounds, 1_000):
        batch = chain.certificates[first : min(first + 1_000, num_rounds)]
        head = store(serving, head, [decode_certificate(data) for data in batch])
    network = MemoryNetwork(Random(0))
    server, me = identity_of("server").peer_id, identity_of("joiner").peer_id
    MemoryTransport(network, server, MemoryBlobs()).set_question_handler(ChainSource(serving, chain.genesis).answer)
    ledger, verification = Ledger(folder / "joining.sqlite"), Verification(verify)
    place = resume(ledger, chain.genesis, None, me)
    around = Surroundings(
        ledger=ledger,
        transport=MemoryTransport(network, me, MemoryBlobs()),
        verification=verification,
        clock=MonotonicClock(),
        notify=lambda level, text: None,
        waiting=lambda text: None,
        skip_rounds=skip_rounds,
    )
    began, began_cpu = time.perf_counter(), time.process_time()
    await CatchUp(place, around).run([server])
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    print(f"{num_rounds:,} rounds: {elapsed_s:.2f} s, {cpu_s:.2f} s of processor time, the serving side's included")
    if place.head != head:
        raise SystemExit(f"the joiner is at round {place.head.round}, not at {head.round}")
    verification.close()
    ledger.close()
    serving.close()
    return elapsed_s


def plain(chain: MadeChain) -> float:
    """Seconds for the first 200 rounds, one signature after another."""
    began = time.perf_counter()
    for link in links(chain.genesis, chain.certificates[:SHORT_ROUNDS]):
        verify_checks(link.checks, verify)
    return time.perf_counter() - began


def row(name: str, ours_s: float, peer_s: float, target_s: float) -> dict[str, object]:
    return {
        "name": name,
        "ours": round(ours_s, 2),
        "peer": round(peer_s, 2),
        "ratio": round(ours_s / peer_s, 3),
        "better": "lower",
        "target": round(target_s / peer_s, 3),
    }


def measure(num_rounds: int) -> list[dict[str, object]]:
    """The table."""
    chain = make(num_rounds)
    one_by_one_s = plain(chain)
    whole_s = one_by_one_s * num_rounds / SHORT_ROUNDS
    rows = []
    for name, rounds, skip_rounds, peer_s, target_s in (
        (f"whole chain of {SHORT_ROUNDS} rounds, s", SHORT_ROUNDS, num_rounds, one_by_one_s, SHORT_TARGET_S),
        (f"whole chain of {num_rounds:,} rounds, s", num_rounds, num_rounds, whole_s, LONG_TARGET_S),
        (f"{num_rounds:,} rounds by the skip rule, s", num_rounds, 100, whole_s, SKIP_TARGET_S),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours_s = asyncio.run(catch_up(Path(folder), chain, rounds, skip_rounds))
        rows.append(row(name, ours_s, peer_s, target_s))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    print(f"{f'{VOTERS} voters':<42} {'ours':>8} {'plain':>8} {'ratio':>6} {'target':>7}")
    for one in rows:
        print(f"{one['name']:<42} {one['ours']:>8} {one['peer']:>8} {one['ratio']:>6} {one['target']:>7}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
