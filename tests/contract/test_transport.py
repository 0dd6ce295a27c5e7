"""What every transport promises: the fake and the one over libp2p pass the same suite.

Each kind of transport is an entry of `SWARMS`: a context that starts some peers who can reach each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.digests import CHUNK_BYTES, blob_id, chunk_digests
from spes_p2p.errors import BlobError, RemoteProtocolError, TransportError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import BlobStore, Transport
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.testing.loopback import loopback_swarm
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport

DATA = Random(5).randbytes(2 * CHUNK_BYTES + 12_345)
BLOB = blob_id(DATA)
CHUNKS = chunk_digests(DATA)
WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """One peer of a swarm."""

    transport: Transport
    blobs: BlobStore
    """A DiskBlobs, so that a test can damage it."""


Swarm = Callable[[int], AbstractAsyncContextManager[Sequence[Member]]]
"""Starts so many peers; they are closed at the end, those already closed included."""


def spoil(store: BlobStore) -> None:
    """Put BLOB into a store on disk and flip a byte of its second chunk behind the store's back."""
    if not isinstance(store, DiskBlobs):
        raise TypeError("members of a swarm keep their blobs on disk")
    store.put(DATA)
    at = CHUNK_BYTES + 7
    with store.path(BLOB).open("r+b") as file:
        file.seek(at)
        file.write(bytes([DATA[at] ^ 0xFF]))


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number + 1]) * 32)


def memory_swarm(folder: Path) -> Swarm:
    @asynccontextmanager
    async def swarm(num_peers: int) -> AsyncIterator[Sequence[Member]]:
        network = MemoryNetwork(Random(0))
        members = []
        for number in range(num_peers):
            blobs = DiskBlobs(folder / str(number))
            transport = MemoryTransport(network, identity(number).peer_id, blobs)
            members.append(Member(transport=transport, blobs=blobs))
        yield members
        for member in members:
            await member.transport.close()

    return swarm


def p2p_swarm(folder: Path) -> Swarm:
    @asynccontextmanager
    async def swarm(num_peers: int) -> AsyncIterator[Sequence[Member]]:
        async with loopback_swarm(folder) as peers:
            started = [await peers.start(number + 1) for number in range(num_peers)]
            for one, other in permutations(started, 2):
                one.transport.add_peer(other.identity.peer_id, await other.transport.addresses())
            yield [Member(transport=peer.transport, blobs=peer.blobs) for peer in started]

    return swarm


SWARMS: dict[str, Callable[[Path], Swarm]] = {"memory": memory_swarm, "p2p": p2p_swarm}


@pytest.fixture(params=["memory", pytest.param("p2p", marks=pytest.mark.live)])
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Swarm:
    kind: str = request.param
    return SWARMS[kind](tmp_path)


class Inbox:
    """A message handler that keeps what it got."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue()

    async def __call__(self, sender: PeerId, data: bytes) -> None:
        if data == b"hostile":
            raise RemoteProtocolError(sender, "malformed")
        await self.queue.put((sender, data))

    async def next(self) -> tuple[PeerId, bytes]:
        return await asyncio.wait_for(self.queue.get(), WAIT_S)


def listen(member: Member) -> Inbox:
    inbox = Inbox()
    member.transport.set_message_handler(inbox)
    return inbox


async def test_a_message_arrives_whole_with_its_true_sender(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        inbox_a, inbox_b = listen(a), listen(b)
        for data in (b"", b"vote", bytes(range(256)) * 8192):
            await a.transport.send(b.transport.peer_id, data)
            assert await inbox_b.next() == (a.transport.peer_id, data)
        await b.transport.send(a.transport.peer_id, b"answer")
        assert await inbox_a.next() == (b.transport.peer_id, b"answer")


async def test_messages_of_one_sender_sent_in_turn_arrive_in_order(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        inbox = listen(b)
        for number in range(50):
            await a.transport.send(b.transport.peer_id, bytes([number]))
        assert [(await inbox.next())[1][0] for _ in range(50)] == list(range(50))


async def test_a_message_above_the_limit_is_not_sent(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        inbox = listen(b)
        with pytest.raises(TransportError):
            await a.transport.send(b.transport.peer_id, bytes((4 << 20) + 1))
        await a.transport.send(b.transport.peer_id, b"next")
        assert await inbox.next() == (a.transport.peer_id, b"next")


async def test_a_refused_message_does_not_stop_the_next_one(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        inbox = listen(b)
        with suppress(TransportError):  # a transport may tell the sender, or only count it
            await a.transport.send(b.transport.peer_id, b"hostile")
        await a.transport.send(b.transport.peer_id, b"honest")
        assert await inbox.next() == (a.transport.peer_id, b"honest")


async def test_a_peer_that_is_not_there_is_a_transport_error(swarm: Swarm) -> None:
    async with swarm(1) as (a,):
        with pytest.raises(TransportError):
            await asyncio.wait_for(a.transport.send(identity(99).peer_id, b"hello"), WAIT_S)


async def test_a_peer_that_has_closed_is_a_transport_error(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        listen(b)
        await b.transport.close()
        with pytest.raises(TransportError):
            await asyncio.wait_for(a.transport.send(b.transport.peer_id, b"hello"), WAIT_S)


async def test_a_closed_transport_sends_nothing_and_may_be_closed_again(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        listen(b)
        await a.transport.close()
        await a.transport.close()
        with pytest.raises(TransportError):
            await a.transport.send(b.transport.peer_id, b"hello")


async def test_fetch_brings_a_blob_into_the_own_store(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        b.blobs.put(DATA)
        await a.transport.fetch(BLOB, [b.transport.peer_id])
        assert bytes(a.blobs.read(BLOB)) == DATA


async def test_fetch_of_the_empty_blob_and_of_a_small_one(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        for data in (b"", b"small"):
            blob = b.blobs.put(data)
            await a.transport.fetch(blob, [b.transport.peer_id])
            assert bytes(a.blobs.read(blob)) == data


async def test_fetch_of_a_blob_that_is_here_asks_nobody(swarm: Swarm) -> None:
    async with swarm(1) as (a,):
        a.blobs.put(DATA)
        await a.transport.fetch(BLOB, [identity(99).peer_id])
        await a.transport.fetch(BLOB, [])
        assert a.transport.bytes_received() == 0


async def test_fetch_goes_on_with_another_source(swarm: Swarm) -> None:
    async with swarm(3) as (a, b, c):
        c.blobs.put(DATA)
        await a.transport.fetch(BLOB, [b.transport.peer_id, c.transport.peer_id])
        assert bytes(a.blobs.read(BLOB)) == DATA


async def test_fetch_resumes_what_is_here(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        b.blobs.put(DATA)
        for index in (0, 2):
            partial = a.blobs.partial(BLOB, len(DATA), CHUNKS)
            partial.write(index, DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        await a.transport.fetch(BLOB, [b.transport.peer_id])
        assert bytes(a.blobs.read(BLOB)) == DATA
        # the middle chunk, and what it takes to learn the chunk list
        assert CHUNK_BYTES <= a.transport.bytes_received() < CHUNK_BYTES + 65_536


async def test_fetch_leaves_a_source_with_wrong_bytes(swarm: Swarm) -> None:
    async with swarm(3) as (a, b, c):
        c.blobs.put(DATA)
        spoil(b.blobs)
        await a.transport.fetch(BLOB, [b.transport.peer_id, c.transport.peer_id])
        assert bytes(a.blobs.read(BLOB)) == DATA


async def test_fetch_from_a_source_with_wrong_bytes_alone_fails_and_shows_nothing(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        spoil(b.blobs)
        with pytest.raises(BlobError):
            await a.transport.fetch(BLOB, [b.transport.peer_id])
        assert not a.blobs.has(BLOB)


async def test_fetch_without_a_source_left_is_a_blob_error(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        for sources in ([], [b.transport.peer_id]):
            with pytest.raises(BlobError):
                await a.transport.fetch(Digest(b"\x07" * 32), sources)


async def test_two_fetches_of_one_blob_at_once_both_succeed(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        b.blobs.put(DATA)
        await asyncio.gather(*(a.transport.fetch(BLOB, [b.transport.peer_id]) for _ in range(2)))
        assert bytes(a.blobs.read(BLOB)) == DATA


async def test_counters_count_the_payload_on_both_sides(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        inbox = listen(b)
        await a.transport.send(b.transport.peer_id, bytes(1000))
        await inbox.next()
        assert a.transport.bytes_sent() >= 1000
        assert b.transport.bytes_received() >= 1000
        b.blobs.put(DATA)
        await a.transport.fetch(BLOB, [b.transport.peer_id])
        assert a.transport.bytes_received() >= len(DATA)
        assert b.transport.bytes_sent() >= len(DATA)


async def test_a_question_is_answered_with_all_frames_in_order(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        asked: list[tuple[PeerId, bytes]] = []

        async def answer(asker: PeerId, question: bytes) -> Sequence[bytes]:
            asked.append((asker, question))
            return [b"", b"certificate", bytes(1 << 20)] if question == b"chain" else []

        b.transport.set_question_handler(answer)
        assert await a.transport.ask(b.transport.peer_id, b"chain") == (b"", b"certificate", bytes(1 << 20))
        assert await a.transport.ask(b.transport.peer_id, b"") == ()
        assert asked == [(a.transport.peer_id, b"chain"), (a.transport.peer_id, b"")]


async def test_who_has_no_answers_or_refuses_is_a_transport_error(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        with pytest.raises(TransportError):
            await a.transport.ask(b.transport.peer_id, b"tip")

        async def answer(asker: PeerId, question: bytes) -> Sequence[bytes]:
            if question == b"hostile":
                raise RemoteProtocolError(asker, "malformed")
            return [question]

        b.transport.set_question_handler(answer)
        with pytest.raises(TransportError):
            await a.transport.ask(b.transport.peer_id, b"hostile")
        assert await a.transport.ask(b.transport.peer_id, b"tip") == (b"tip",)


async def test_a_question_beyond_the_limit_is_not_answered(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):

        async def answer(asker: PeerId, question: bytes) -> Sequence[bytes]:
            return [question]

        b.transport.set_question_handler(answer)
        with pytest.raises(TransportError):
            await a.transport.ask(b.transport.peer_id, bytes(129))


async def test_an_answer_beyond_the_limits_is_refused(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):

        async def answer(asker: PeerId, question: bytes) -> Sequence[bytes]:
            return [b""] * 65 if question == b"many" else [bytes(4 << 20), b"one too many"]

        b.transport.set_question_handler(answer)
        for question in (b"many", b"large"):
            with pytest.raises(RemoteProtocolError):
                await a.transport.ask(b.transport.peer_id, question)


async def test_questions_to_a_peer_that_is_not_there_or_from_a_closed_one_fail(swarm: Swarm) -> None:
    async with swarm(2) as (a, b):
        with pytest.raises(TransportError):
            await asyncio.wait_for(a.transport.ask(identity(99).peer_id, b"tip"), WAIT_S)
        await a.transport.close()
        with pytest.raises(TransportError):
            await a.transport.ask(b.transport.peer_id, b"tip")
