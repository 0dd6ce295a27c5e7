"""The network in memory: what its faults do, and that a seed repeats them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from spes_p2p.digests import CHUNK_BYTES
from spes_p2p.errors import BlobError, RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.clock import VirtualClock
from spes_p2p.testing.network import Faults, MemoryNetwork, MemoryTransport

A, B, C = (PeerId(bytes([number]) * 32) for number in range(3))


async def ignore(_: PeerId, __: bytes) -> None:
    return None


def attach(network: MemoryNetwork, *peers: PeerId) -> list[MemoryTransport]:
    transports = [MemoryTransport(network, peer, MemoryBlobs()) for peer in peers]
    for transport in transports:
        transport.set_message_handler(ignore)
    return transports


async def losses(seed: int) -> list[bool]:
    a, _ = attach(MemoryNetwork(Random(seed), Faults(loss=0.3)), A, B)
    lost = []
    for _ in range(100):
        try:
            await a.send(B, b"x")
        except TransportError:
            lost.append(True)
        else:
            lost.append(False)
    return lost


async def test_one_seed_loses_the_same_messages_every_time() -> None:
    first, again, other = await losses(1), await losses(1), await losses(2)
    assert first == again
    assert first != other
    assert 15 <= sum(first) <= 45


async def test_a_delayed_message_arrives_when_its_time_has_come() -> None:
    clock = VirtualClock()
    network = MemoryNetwork(Random(0), Faults(min_delay_ms=40, max_delay_ms=40), clock.sleep_ms)
    a, b = attach(network, A, B)
    sending = asyncio.create_task(a.send(B, b"x"))
    while clock.next_wake_ms() is None:
        await asyncio.sleep(0)
    clock.jump(39)
    await asyncio.sleep(0)
    assert b.bytes_received() == 0
    clock.jump(1)
    await sending
    assert b.bytes_received() == 1


def test_delays_without_a_clock_are_refused() -> None:
    with pytest.raises(ValueError, match="sleep_ms"):
        MemoryNetwork(Random(0), Faults(max_delay_ms=1))


async def test_a_partition_cuts_the_lines_between_islands_until_it_heals() -> None:
    network = MemoryNetwork(Random(0))
    a, _, c = attach(network, A, B, C)
    network.partition([A, B])
    await a.send(B, b"x")
    for sender, receiver in ((a, C), (c, A)):
        with pytest.raises(TransportError, match="lost"):
            await sender.send(receiver, b"x")
    network.heal()
    await a.send(C, b"x")


async def test_a_second_peer_with_the_same_key_is_refused() -> None:
    network = MemoryNetwork(Random(0))
    (a,) = attach(network, A)
    with pytest.raises(TransportError, match="identity in use"):
        attach(network, A)
    await a.close()
    attach(network, A)


async def test_a_refusal_is_told_to_the_sender_with_its_reason() -> None:
    a, b = attach(MemoryNetwork(Random(0)), A, B)

    async def refuse(sender: PeerId, _: bytes) -> None:
        raise RemoteProtocolError(sender, "malformed vote")

    b.set_message_handler(refuse)
    with pytest.raises(TransportError, match="malformed vote"):
        await a.send(B, b"x")
    assert a.bytes_sent() == 0


async def test_a_fetch_under_loss_ends_after_some_tries_and_moves_no_chunk_twice() -> None:
    network = MemoryNetwork(Random(3))
    source, target = MemoryBlobs(), MemoryBlobs()
    MemoryTransport(network, A, source)
    b = MemoryTransport(network, B, target)
    data = bytes(20 * CHUNK_BYTES)
    blob = source.put(data)
    network.set_faults(Faults(loss=0.2))
    num_failures = 0
    while not target.has(blob):
        try:
            await b.fetch(blob, [A])
        except BlobError:
            num_failures += 1
    assert num_failures > 0
    assert b.bytes_received() == len(data)
