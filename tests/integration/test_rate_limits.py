"""Rate limits on real transfers: what the network daemon sends is measured from outside, by the kernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from spes_p2p.errors import BlobError
from spes_p2p.ids import PeerId
from spes_p2p.testing.loopback import LoopbackPeer, LoopbackSwarm, loopback_swarm
from spes_p2p.testing.rates import Samples, SentMeter, watch_sent, window_rates

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not SentMeter.is_possible(), reason="what a process has sent is asked of iproute2's ss"),
]

CAP = 1_000_000
WINDOW_S = 10.0


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[LoopbackSwarm]:
    async with loopback_swarm(tmp_path) as started:
        yield started


async def start(swarm: LoopbackSwarm, count: int) -> list[LoopbackPeer]:
    peers = [await swarm.start(number + 1) for number in range(count)]
    for one in peers:
        for other in peers:
            one.transport.add_peer(other.identity.peer_id, await other.transport.addresses())
    return peers


@pytest.mark.live_long
async def test_an_upload_cap_holds_over_any_ten_seconds_while_messages_go_first(swarm: LoopbackSwarm) -> None:
    ada, ben, cleo = await start(swarm, 3)
    blobs = [ada.blobs.put(Random(seed).randbytes(7_500_000)) for seed in (1, 2)]
    heard: list[float] = []

    async def hear(sender: PeerId, data: bytes) -> None:
        heard.append(time.monotonic())

    for peer in (ben, cleo):
        peer.transport.set_message_handler(hear)
    await ada.transport.send(ben.identity.peer_id, b"hello")
    ada.transport.set_rates(CAP, None)

    async def fetch_all() -> None:
        await asyncio.gather(
            *(peer.transport.fetch(blob, [ada.identity.peer_id]) for peer in (ben, cleo) for blob in blobs[:1]),
            cleo.transport.fetch(blobs[1], [ada.identity.peer_id]),
        )

    delays: list[float] = []

    async def talk() -> None:
        """Consensus, roughly: 2 kB to each of the others, five times a second."""
        while True:
            began_s = time.monotonic()
            await asyncio.gather(*(ada.transport.send(p.identity.peer_id, bytes(2_000)) for p in (ben, cleo)))
            delays.append(time.monotonic() - began_s)
            await asyncio.wait({fetching}, timeout=0.2)

    fetching = asyncio.create_task(fetch_all())
    talking = asyncio.create_task(talk())
    samples: Samples = await watch_sent(ada.transport.daemon_pid, fetching)
    talking.cancel()
    await fetching
    rates = window_rates(samples, WINDOW_S)
    assert len(rates) > 20
    assert max(rates) <= 1.1 * CAP
    assert sorted(rates)[len(rates) // 2] >= 0.9 * CAP, "the line was used while there was something to send"
    assert len(heard) > 50
    assert sorted(delays)[len(delays) // 2] < 0.5, "a message waits for one slice of a blob, not for the blob"


async def test_a_download_cap_holds_and_its_sources_are_not_taken_for_slow_ones(swarm: LoopbackSwarm) -> None:
    ada, ben = await start(swarm, 2)
    size = 6_000_000
    blob = ada.blobs.put(Random(3).randbytes(size))
    ben.transport.set_min_rate(50_000_000)  # reading alone is judged, which loopback does as fast as that
    ben.transport.set_rates(None, 2 * CAP)
    fetching = asyncio.create_task(ben.transport.fetch(blob, [ada.identity.peer_id]))
    samples = await watch_sent(ada.transport.daemon_pid, fetching)
    await fetching
    took_s = samples[-1][0] - samples[0][0]
    assert took_s >= 0.8 * size / (2 * CAP)
    assert ben.transport.bytes_down() >= size


async def test_without_a_budget_blobs_stop_both_ways_and_messages_go_on(swarm: LoopbackSwarm) -> None:
    ada, ben = await start(swarm, 2)
    mine, theirs = ada.blobs.put(b"a" * 3_000_000), ben.blobs.put(b"b" * 3_000_000)
    got = asyncio.Event()

    async def hear(sender: PeerId, data: bytes) -> None:
        got.set()

    ben.transport.set_message_handler(hear)
    ada.transport.set_no_blobs("the month's bytes are used up")
    with pytest.raises(BlobError, match="absent there"):
        await ben.transport.fetch(mine, [ada.identity.peer_id])
    with pytest.raises(BlobError, match="the month's bytes are used up"):
        await ada.transport.fetch(theirs, [ben.identity.peer_id])
    await ada.transport.send(ben.identity.peer_id, b"still here")
    async with asyncio.timeout(30):
        await got.wait()
    ada.transport.set_no_blobs("what is left is kept for the hand-over", frozenset({mine}))
    await ben.transport.fetch(mine, [ada.identity.peer_id])
    with pytest.raises(BlobError, match="kept for the hand-over"):
        await ada.transport.fetch(theirs, [ben.identity.peer_id])
    ada.transport.set_no_blobs("")
    await ada.transport.fetch(theirs, [ben.identity.peer_id])


async def test_a_transfer_under_way_ends_when_the_budget_does(swarm: LoopbackSwarm) -> None:
    ada, ben = await start(swarm, 2)
    blob = ada.blobs.put(Random(4).randbytes(8_000_000))
    ada.transport.set_rates(4 * CAP, None)
    fetching = asyncio.create_task(ben.transport.fetch(blob, [ada.identity.peer_id]))
    while ada.transport.bytes_up() < 2_000_000:
        await asyncio.wait({fetching}, timeout=0.05)
    ada.transport.set_no_blobs("the month's bytes are used up")
    with pytest.raises(BlobError, match="no source is left"):
        await fetching
    assert ada.transport.bytes_up() < 4_000_000
    ada.transport.set_no_blobs("")
    ada.transport.set_rates(None, None)
    await ben.transport.fetch(blob, [ada.identity.peer_id])
