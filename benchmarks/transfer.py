"""Claim: a blob comes faster through our checked, resumable transfer than through hivemind's unary calls.

Ours: `P2PTransport.fetch`, disk to disk, every chunk verified. Peer: hivemind's `call_protobuf_handler` with 1 MiB a
call, memory to memory, nothing verified. Same run, same machine, loopback, one after the other, three times each.

    python benchmarks/transfer.py [--mib 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from hivemind.p2p import P2P, P2PContext  # type: ignore[import-untyped]  # untyped
from hivemind.proto import runtime_pb2  # type: ignore[import-untyped]  # untyped

from spes_p2p.testing.loopback import LoopbackSwarm, loopback_swarm

CHUNK_BYTES = 1 << 20
REPEATS = 3
TARGET = 2.0


async def ours(swarm: LoopbackSwarm, data: list[bytes]) -> list[float]:
    """MB/s of fetching each blob from one peer into another's store."""
    server = await swarm.start(1)
    client = await swarm.start(2)
    client.transport.add_peer(server.identity.peer_id, await server.transport.addresses())
    rates = []
    for blob in [server.blobs.put(one) for one in data]:
        began = time.perf_counter()
        await client.transport.fetch(blob, [server.identity.peer_id])
        rates.append(client.blobs.size_bytes(blob) / 1e6 / (time.perf_counter() - began))
    return rates


async def unary(data: list[bytes]) -> list[float]:
    """MB/s of hivemind's unary calls for the same bytes."""
    server = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    client = await P2P.create(initial_peers=await server.get_visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    chunks = [[one[at : at + CHUNK_BYTES] for at in range(0, len(one), CHUNK_BYTES)] for one in data]

    async def serve(request: runtime_pb2.Tensor, _: P2PContext) -> runtime_pb2.Tensor:
        which, index = request.size
        return runtime_pb2.Tensor(buffer=chunks[which][index])

    await server.add_protobuf_handler("chunk", serve, runtime_pb2.Tensor)
    rates = []
    try:
        for which, parts in enumerate(chunks):
            began = time.perf_counter()
            received = 0
            for index in range(len(parts)):
                request = runtime_pb2.Tensor(size=[which, index])
                answer = await client.call_protobuf_handler(server.peer_id, "chunk", request, runtime_pb2.Tensor)
                received += len(answer.buffer)
            rates.append(received / 1e6 / (time.perf_counter() - began))
    finally:
        await client.shutdown()
        await server.shutdown()
    return rates


async def measure(mib: int) -> dict[str, object]:
    """One row of the table."""
    generator = np.random.default_rng(0)
    data = [generator.bytes(mib << 20) for _ in range(REPEATS)]
    with tempfile.TemporaryDirectory() as folder:
        async with loopback_swarm(Path(folder)) as swarm:
            mine = statistics.median(await ours(swarm, data))
        peer = statistics.median(await unary(data))
    return {
        "name": f"blob of {mib} MiB over loopback, MB/s",
        "ours": round(mine, 1),
        "peer": round(peer, 1),
        "ratio": round(mine / peer, 2),
        "better": "higher",
        "target": TARGET,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    row = asyncio.run(measure(arguments.mib))
    print(f"{'':<42} {'ours':>8} {'unary':>8} {'ratio':>6} {'target':>7}")
    print(f"{row['name']:<42} {row['ours']:>8} {row['peer']:>8} {row['ratio']:>6} {row['target']:>7}")
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=2) + "\n")


if __name__ == "__main__":
    main()
