"""Real daemons on loopback: peers find each other, talk, fetch, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.digests import CHUNK_BYTES, chunk_digests
from spes_p2p.errors import (
    AddressError,
    BlobError,
    IdentityError,
    MachineError,
    RemoteProtocolError,
    TransportError,
    UnreachableError,
)
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network import reception, transfer
from spes_p2p.network.channel import UnfitPeerError
from spes_p2p.network.entry import Entrances
from spes_p2p.network.hints import PeerHint, encode_hint, hint_key
from spes_p2p.network.p2p import RELAY_LIMITS, RelayLimits
from spes_p2p.network.relaying import reserve
from spes_p2p.network.transport import NetworkOptions, P2PTransport
from spes_p2p.network.wire import BLOB_STREAM
from spes_p2p.testing.loopback import LoopbackPeer, LoopbackSwarm, loopback_swarm, until
from spes_p2p.testing.offspring import Offspring

pytestmark = pytest.mark.live

RUN = RunId(bytes(range(32)))
DATA = Random(3).randbytes(5 * CHUNK_BYTES + 77)
CHUNKS = chunk_digests(DATA)
BOOTSTRAP = 9


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[LoopbackSwarm]:
    async with loopback_swarm(tmp_path) as started:
        yield started


def options(*entrances: str, run: RunId | None = RUN, **changes: object) -> NetworkOptions:
    return replace(NetworkOptions(identity_path=Path(), initial_peers=entrances, run=run), **changes)


async def address_of(peer: LoopbackPeer) -> str:
    return (await peer.transport.addresses())[0]


class Inbox:
    def __init__(self, peer: LoopbackPeer) -> None:
        self.messages: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue()
        peer.transport.set_message_handler(self)

    async def __call__(self, sender: PeerId, data: bytes) -> None:
        await self.messages.put((sender, data))

    async def next(self) -> tuple[PeerId, bytes]:
        async with asyncio.timeout(60):
            return await self.messages.get()


async def test_peers_find_each_other_through_a_bootstrap_node_and_talk(swarm: LoopbackSwarm) -> None:
    bootstrap = await swarm.start(BOOTSTRAP, options(run=None, relay=True))
    entrance = await address_of(bootstrap)
    began_s = time.monotonic()
    alice = await swarm.start(1, options(entrance))
    took_ms = 1000 * (time.monotonic() - began_s)
    bob = await swarm.start(2, options(entrance))
    inbox = Inbox(bob)

    async def everybody_is_found() -> bool:
        return [hint.peer for hint in await alice.transport.discovery.find(RUN)] == sorted(
            [alice.identity.peer_id, bob.identity.peer_id]
        )

    await until(everybody_is_found)
    await alice.transport.send(bob.identity.peer_id, b"hello")
    assert await inbox.next() == (alice.identity.peer_id, b"hello")
    assert alice.transport.is_connected(bob.identity.peer_id)
    # one clock: what was measured is how much longer the hello was on its way than its answer, or the other way round
    assert abs(alice.transport.skews_ms[bootstrap.identity.peer_id]) <= took_ms / 2 + 1
    assert await bob.transport.discovery.find(RunId(bytes(32))) == []
    with pytest.raises(TransportError, match="takes no messages"):
        await alice.transport.send(bootstrap.identity.peer_id, b"hello")


async def test_hostile_records_are_not_stored_and_do_no_harm(swarm: LoopbackSwarm) -> None:
    victim = await swarm.start(BOOTSTRAP, options(run=None))
    entrance = await address_of(victim)
    alice, mallory = await swarm.start(1, options(entrance)), await swarm.start(2, options(entrance))
    key, later_s = hint_key(RUN), time.time() + 60

    async def alice_is_found() -> bool:
        return alice.identity.peer_id in [hint.peer for hint in await victim.transport.discovery.find(RUN)]

    await until(alice_is_found)
    dht = mallory.transport.discovery._node
    dht.protocol.record_validator = None  # mallory runs other software
    forged = PeerHint(
        peer=alice.identity.peer_id,
        run=RUN,
        protocol=1,
        session=bytes(16),
        expires_ms=int(later_s * 1000),
        addresses=(f"/ip4/203.0.113.7/tcp/1/p2p/{alice.identity.text}",),
    )
    deep: object = 1
    for _ in range(50):
        deep = (deep,)
    await dht.store(key, encode_hint(mallory.identity, forged), later_s, subkey=bytes(alice.identity.peer_id))
    await dht.store(key, b"a plain record", time.time() + 1000, exclude_self=True)
    await dht.store(key, deep, later_s, subkey=bytes(mallory.identity.peer_id))
    await dht.store("another key", b"spam", later_s, subkey=b"spam", exclude_self=True)

    hints = {hint.peer: hint for hint in await victim.transport.discovery.find(RUN)}
    assert hints[alice.identity.peer_id].addresses == await alice.transport.addresses()
    assert await victim.transport.discovery._node.get("another key", latest=True) is None


async def test_a_blob_comes_from_another_source_when_one_dies_half_way_and_one_lies(
    swarm: LoopbackSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await swarm.start(1, options())
    entrance = await address_of(alice)
    dying, lying, honest = [await swarm.start(number, options(entrance)) for number in (2, 3, 4)]
    for peer in (dying, lying, honest):
        blob = peer.blobs.put(DATA)
        alice.transport.add_peer(peer.identity.peer_id, await peer.transport.addresses())
    with lying.blobs.path(blob).open("r+b") as file:
        file.seek(3 * CHUNK_BYTES)
        file.write(bytes([DATA[3 * CHUNK_BYTES] ^ 1]))

    read = dying.blobs.read

    def die_at_the_third_chunk(blob_id: object, start: int = 0, stop: int | None = None) -> memoryview:
        if start >= 2 * CHUNK_BYTES:
            raise BlobError("the line broke")
        return read(blob, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dying.blobs, "read", die_at_the_third_chunk)
        for source in (dying, lying):
            with pytest.raises(BlobError, match=source.identity.text):
                await alice.transport.fetch(blob, [source.identity.peer_id])
            assert not alice.blobs.has(blob)
        received = alice.transport.bytes_received()
        assert received >= 3 * CHUNK_BYTES
        await alice.transport.fetch(blob, [peer.identity.peer_id for peer in (dying, lying, honest)])
    assert bytes(alice.blobs.read(blob)) == DATA
    assert any(lying.identity.text in record.message for record in caplog.records)
    # resumed: nothing that had arrived came twice, but what the liar spoilt
    assert alice.transport.bytes_received() <= len(DATA) + 3 * CHUNK_BYTES


async def test_a_fetch_goes_on_where_it_stopped_after_a_restart(swarm: LoopbackSwarm) -> None:
    alice, bob = await swarm.start(1, options()), await swarm.start(2, options())
    blob = bob.blobs.put(DATA)
    partial = alice.blobs.partial(blob, len(DATA), CHUNKS)
    for index in (0, 1, 5):
        partial.write(index, DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
    await alice.transport.close()
    alice = await swarm.start(1, options(await address_of(bob)))
    await alice.transport.fetch(blob, [bob.identity.peer_id])
    assert bytes(alice.blobs.read(blob)) == DATA
    assert alice.transport.bytes_received() == 3 * CHUNK_BYTES


async def test_a_source_below_the_minimum_rate_is_left_for_another(
    swarm: LoopbackSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "ANSWER_TIMEOUT_S", 0.3)
    alice, slow, good = [await swarm.start(number, options()) for number in (1, 2, 3)]
    for peer in (slow, good):
        blob = peer.blobs.put(DATA)
        alice.transport.add_peer(peer.identity.peer_id, await peer.transport.addresses())
    ends = asyncio.Event()

    async def never_answer(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.wait()

    await slow.transport._daemon.remove_binary_stream_handler(BLOB_STREAM)
    await slow.transport._daemon.serve_stream(BLOB_STREAM, never_answer)
    await alice.transport.fetch(blob, [slow.identity.peer_id, good.identity.peer_id])
    ends.set()
    assert bytes(alice.blobs.read(blob)) == DATA


async def test_a_blob_above_the_callers_limit_is_not_stored(swarm: LoopbackSwarm) -> None:
    alice, bob = await swarm.start(1, options()), await swarm.start(2, options())
    alice.transport.add_peer(bob.identity.peer_id, await bob.transport.addresses())
    blob = bob.blobs.put(DATA)
    with pytest.raises(BlobError, match="at most 1000"):
        await alice.transport.fetch(blob, [bob.identity.peer_id], max_bytes=1000)
    assert alice.transport.bytes_received() == 0


async def test_a_second_process_with_the_same_identity_is_refused_and_a_restart_is_not(
    swarm: LoopbackSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = await swarm.start(BOOTSTRAP, options(run=None))
    entrance = await address_of(bootstrap)
    first = await swarm.start(1, options(entrance))
    with pytest.raises(IdentityError, match="identity in use"):
        await swarm.start(1, options(entrance))
    await first.transport.close()
    again = await swarm.start(1, options(entrance))
    assert again.transport.session != first.transport.session
    with pytest.raises(AddressError, match="own"):
        await swarm.start(1, options(await address_of(again)))


async def test_a_frozen_first_process_loses_its_place(swarm: LoopbackSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "SIGN_OF_LIFE_TIMEOUT_S", 0.2)
    bootstrap = await swarm.start(BOOTSTRAP, options(run=None))
    entrance = await address_of(bootstrap)
    first = await swarm.start(1, options(entrance))
    first.transport._channels[bootstrap.identity.peer_id]._writer.transport.pause_reading()  # hears nothing any more
    second = await swarm.start(1, options(entrance))
    assert second.transport.is_connected(bootstrap.identity.peer_id)


async def test_peers_with_other_settings_are_told_both_values(swarm: LoopbackSwarm) -> None:
    alice = await swarm.start(1, options(settings={"model.width": "96"}))
    with pytest.raises(UnreachableError, match=r"model.width is 128 here, 96 there"):
        await swarm.start(2, options(await address_of(alice), settings={"model.width": "128"}))
    bob = await swarm.start(2, options(await address_of(alice)))
    bob.transport.set_settings({"model.width": "128"})
    alice.transport.add_peer(bob.identity.peer_id, await bob.transport.addresses())
    with pytest.raises(UnfitPeerError, match=r"model.width is 96 here, 128 there"):
        await alice.transport.send(bob.identity.peer_id, b"hello")
    assert "model.width" in alice.transport.refusals[bob.identity.peer_id]


async def test_a_peer_that_keeps_breaking_the_rules_is_not_heard_any_more(swarm: LoopbackSwarm) -> None:
    alice, mallory = await swarm.start(1, options()), await swarm.start(2, options())
    mallory.transport.add_peer(alice.identity.peer_id, await alice.transport.addresses())

    async def refuse(sender: PeerId, data: bytes) -> None:
        raise RemoteProtocolError(sender, "malformed vote")

    alice.transport.set_message_handler(refuse)
    with pytest.raises(TransportError, match="malformed vote"):
        await mallory.transport.send(alice.identity.peer_id, b"rubbish")
    reasons = []
    for _ in range(25):
        with pytest.raises(TransportError) as caught:
            await mallory.transport.send(alice.identity.peer_id, b"rubbish")
        reasons.append(str(caught.value))
    assert "does not listen" in reasons[-1]


async def test_a_bug_in_a_message_handler_does_not_pass_in_silence(swarm: LoopbackSwarm) -> None:
    alice, bob = await swarm.start(1, options()), await swarm.start(2, options())
    bob.transport.add_peer(alice.identity.peer_id, await alice.transport.addresses())

    async def stumble(sender: PeerId, data: bytes) -> None:
        raise KeyError("bug")

    alice.transport.set_message_handler(stumble)
    sending = asyncio.create_task(bob.transport.send(alice.identity.peer_id, b"vote"))
    async with asyncio.timeout(60):
        assert isinstance(await alice.transport.wait_failed(), KeyError)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_entrances_that_are_dead_silent_or_somebody_else_are_named_with_their_reason(
    swarm: LoopbackSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_first = Entrances.wait_first

    async def wait_for_two_reasons(entrances: Entrances, timeout_s: float) -> None:
        async def two_are_known() -> bool:
            return len(entrances._reasons) == 2

        await until(two_are_known)
        await wait_first(entrances, 0.0)

    alice = await swarm.start(1, options())
    monkeypatch.setattr(Entrances, "wait_first", wait_for_two_reasons)
    route = (await address_of(alice)).rsplit("/p2p/", 1)[0]
    somebody = Identity.from_seed(bytes([77]) * 32).text
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in (silent, closed)]
        others = [Identity.from_seed(bytes([number]) * 32).text for number in (78, 79)]
        addresses = [f"{route}/p2p/{somebody}"] + [
            f"/ip4/127.0.0.1/tcp/{port}/p2p/{other}" for port, other in zip(ports, others, strict=True)
        ]
        with pytest.raises(UnreachableError) as caught:
            await swarm.start(2, options(*addresses))
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(": ")[0].strip() for line in lines] == addresses
    assert "peer id mismatch" in lines[0]
    assert "no answer" in lines[1]
    assert "Connection refused" in lines[2]


async def test_a_node_joins_through_the_good_one_and_picks_up_the_one_that_starts_late(swarm: LoopbackSwarm) -> None:
    good, late = await swarm.start(1, options()), await swarm.start(2, options())
    addresses = [await address_of(late), await address_of(good)]
    await late.transport.close()
    carol = await swarm.start(3, options(*addresses))
    assert carol.transport.is_connected(good.identity.peer_id)
    assert not carol.transport.is_connected(late.identity.peer_id)
    port = addresses[0].split("/")[4]
    await swarm.start(2, options(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))

    async def late_is_here() -> bool:
        return carol.transport.is_connected(late.identity.peer_id)

    await until(late_is_here)


async def test_a_message_reaches_a_peer_that_was_restarted_elsewhere(swarm: LoopbackSwarm) -> None:
    bootstrap = await swarm.start(BOOTSTRAP, options(run=None))
    entrance = await address_of(bootstrap)
    alice, bob = await swarm.start(1, options(entrance)), await swarm.start(2, options(entrance))
    Inbox(bob)
    alice.transport.add_peer(bob.identity.peer_id, await bob.transport.addresses())
    await alice.transport.send(bob.identity.peer_id, b"before")
    await bob.transport.close()
    bob = await swarm.start(2, options(entrance))
    inbox = Inbox(bob)

    async def delivered() -> bool:
        with contextlib.suppress(TransportError):
            await alice.transport.send(bob.identity.peer_id, b"after")
            return True
        return False

    await until(delivered)
    assert await inbox.next() == (alice.identity.peer_id, b"after")


async def test_a_volunteer_relays_nothing_and_a_bootstrap_node_does(swarm: LoopbackSwarm) -> None:
    volunteer, bootstrap = await swarm.start(1, options()), await swarm.start(BOOTSTRAP, options(run=None, relay=True))
    stranger = (await swarm.start(3, options())).transport._daemon

    async def reserve_at(relay: LoopbackPeer) -> RelayLimits:
        peer, route = relay.identity.peer_id, (await address_of(relay)).rsplit("/p2p/", 1)[0]
        await stranger.dial(peer, [route], timeout_s=60)
        return await reserve(stranger, peer)

    assert await reserve_at(bootstrap) == RELAY_LIMITS
    with pytest.raises(TransportError, match="protocols not supported"):
        await reserve_at(volunteer)


def cannot_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_nothing_is_left_after_close_and_the_port_can_be_used_again(swarm: LoopbackSwarm) -> None:
    alice = await swarm.start(1, options())
    pid, port = alice.transport.daemon_pid, int((await address_of(alice)).split("/")[4])
    folder = alice.transport._daemon._sockets.path
    assert "-relayService=0" in psutil.Process(pid).cmdline()
    await alice.transport.close()
    assert not psutil.pid_exists(pid)
    assert cannot_connect(port)
    assert not folder.exists()
    again = await swarm.start(1, options(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
    with pytest.raises(MachineError, match=f"port {port} is in use"):
        await swarm.start(2, options(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
    await again.transport.close()


async def test_nothing_is_left_when_the_start_is_cancelled(
    swarm: LoopbackSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    offspring = Offspring()
    starting = asyncio.create_task(swarm.start(1, options("/ip4/127.0.0.1/tcp/1/p2p/" + Identity.generate().text)))

    async def daemon_runs() -> bool:
        return any("p2pd" in child.name() for child in offspring.alive())

    await until(daemon_runs)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert offspring.alive() == []


async def test_the_end_of_the_daemon_is_noticed(swarm: LoopbackSwarm) -> None:
    alice = await swarm.start(1, options())
    os.kill(alice.transport.daemon_pid, 9)
    async with asyncio.timeout(60):
        assert "ended by itself" in str(await alice.transport.wait_failed())


async def test_a_damaged_identity_gives_the_daemons_own_words(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"rubbish")
    with pytest.raises(MachineError, match="invalid wire-format"):
        await P2PTransport.create(
            Identity.generate(), None, NetworkOptions(identity_path=path, listen=("/ip4/127.0.0.1/tcp/0",))
        )
