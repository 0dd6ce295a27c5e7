"""Blobs for others: what is counted of them, and that a receiver who takes too long over a chunk is let go."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from spes_p2p.digests import CHUNK_BYTES, DIGEST_BYTES
from spes_p2p.ids import PeerId
from spes_p2p.network import serving
from spes_p2p.network.quotas import QuotaLimits, Quotas
from spes_p2p.network.scores import Traffic
from spes_p2p.network.serving import BlobService
from spes_p2p.network.wire import FRAME_HEAD_BYTES, BlobRequest
from spes_p2p.testing.blobs import MemoryBlobs


class SlowReceiver:
    """A stream that takes `each_s` over each slice, on the loop's clock, which it moves."""

    def __init__(self, each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.each_s, self.passed_s, self.taken = each_s, 0.0, 0
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self.passed_s)

    def write(self, data: bytes) -> None:
        self.taken += len(data)

    async def drain(self) -> None:
        self.passed_s += self.each_s
        await asyncio.sleep(0)


@pytest.mark.parametrize(("each_s", "lets_go"), [(serving.WRITE_TIMEOUT_S / 30, False), (50.0, True)])
async def test_a_chunk_in_slices_has_no_more_time_than_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, each_s: float, lets_go: bool
) -> None:
    traffic = Traffic()
    traffic.up.set_rate(1e9)
    service, receiver = BlobService(MemoryBlobs(), traffic), SlowReceiver(each_s, monkeypatch)
    chunk = bytes(CHUNK_BYTES)
    try:
        await service._write_chunk(cast(asyncio.StreamWriter, receiver), chunk)
    except TimeoutError:
        assert lets_go and receiver.taken < len(chunk) / 3
    else:
        assert not lets_go and receiver.taken > len(chunk)


async def test_a_chunk_list_counts_as_traffic_and_against_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, traffic = MemoryBlobs(), Traffic()
    quotas = Quotas(QuotaLimits(peer_bytes_per_s=1.0), lambda: 0.0)
    blob, peer = blobs.put(bytes(3 * CHUNK_BYTES)), PeerId(b"peer")
    writer = cast(asyncio.StreamWriter, SlowReceiver(0.0, monkeypatch))
    await BlobService(blobs, traffic, quotas)._serve_one(peer, BlobRequest(blob, 0, 0), writer)
    assert traffic.up.num_bytes == FRAME_HEAD_BYTES + 3 * DIGEST_BYTES
    assert quotas.bytes_served == 3 * DIGEST_BYTES
    assert not quotas.admit(peer)  # it had ten bytes


async def test_of_withheld_blobs_the_spared_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, traffic, peer = MemoryBlobs(), Traffic(), PeerId(b"peer")
    kept, other = blobs.put(b"k" * 100), blobs.put(b"o" * 100)
    traffic.no_blobs, traffic.spared = "the month's bytes are used up", frozenset({kept})
    taken = []
    for blob in (kept, other):
        receiver = SlowReceiver(0.0, monkeypatch)
        await BlobService(blobs, traffic)._serve_one(
            peer, BlobRequest(blob, 0, 1), cast(asyncio.StreamWriter, receiver)
        )
        taken.append(receiver.taken)
    assert taken[0] > 100 > taken[1], "the other one is absent"
