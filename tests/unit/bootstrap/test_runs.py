"""What a bootstrap node keeps of runs, over the memory network: whom it believes, and that it stays bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from spes_p2p.bootstrap import runs as runs_module
from spes_p2p.bootstrap.chains import Chain, Following
from spes_p2p.bootstrap.mirror import Mirror
from spes_p2p.bootstrap.runs import Runs
from spes_p2p.crypto import verify
from spes_p2p.errors import LocalStateError, RemoteProtocolError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun, TipAsk
from spes_p2p.protocol.questions import CertificatesQuestion, Tip, TipQuestion, decode_answer
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config
from spes_p2p.testing.swarm import identity_of

ROUNDS = 60
CHAIN = made_chain(4, quick_config(), NUM_PARTS).grow(ROUNDS)
BOOT = identity_of("bootstrap")


def signed(chain: MadeChain) -> SignedRun:
    manifest = chain.genesis.run.manifest
    return SignedRun(manifest, identity_of("founder 0").sign("run", encode(manifest)))


def run_of(chain: MadeChain) -> RunId:
    return chain.genesis.run.run_id


def other_chain(seed: int) -> MadeChain:
    return made_chain(1, quick_config().model_copy(update={"seed": seed}), NUM_PARTS)


class Nobody:
    """A DHT without hints."""

    async def find(self, run: RunId) -> list[object]:
        return []


class Host(MemoryTransport):
    """The bootstrap node's transport; `here` says who visits it."""

    discovery = Nobody()

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network, BOOT.peer_id, MemoryBlobs())
        self.here: dict[PeerId, RunId | None] = {}

    @property
    def visitors(self) -> Mapping[PeerId, RunId | None]:
        return self.here

    def add_peer(self, peer: PeerId, addresses: object) -> None:
        raise AssertionError("nobody has given an address")


class World:
    """A bootstrap node's runs, and peers that visit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork(Random(0))
        self.host = Host(self.network)
        self.verification = Verification(verify, 1)
        self.ledgers: list[Ledger] = []
        self.received: dict[str, asyncio.Queue[bytes]] = {}
        self.following = Following(
            transport=self.host, verification=self.verification, clock=MonotonicClock(), max_bytes=10_000_000
        )
        self.mirror = Mirror(DiskBlobs(folder / "blobs"), self.host, 0)
        self.runs = self.make_runs()

    def make_runs(self) -> Runs:
        runs = Runs(self.folder / "runs", self.host, self.following, self.mirror)  # type: ignore[arg-type]  # its DHT
        self.host.set_message_handler(runs.receive)
        self.host.set_question_handler(runs.answer)
        return runs

    def visitor(self, name: str, run: RunId | None, num_rounds: int | None = None) -> MemoryTransport:
        """A peer that says it is of that run; with `num_rounds` a member that has so much of CHAIN."""
        peer = MemoryTransport(self.network, identity_of(name).peer_id, MemoryBlobs())
        self.host.here[peer.peer_id] = run
        inbox = self.received.setdefault(name, asyncio.Queue())

        async def receive(sender: PeerId, data: bytes) -> None:
            await inbox.put(data)

        peer.set_message_handler(receive)
        if num_rounds is not None:
            ledger = Ledger(self.folder / name / "ledger.sqlite")
            self.ledgers.append(ledger)
            store(ledger, CHAIN.genesis, [decode_certificate(data) for data in CHAIN.certificates[:num_rounds]])
            peer.set_question_handler(ChainSource(ledger, CHAIN.genesis).answer)
        return peer

    async def adopt(self, chain: MadeChain, name: str) -> None:
        """A visitor of a run hands in its manifest."""
        await self.visitor(name, run_of(chain)).send(BOOT.peer_id, encode(signed(chain)))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.runs.close()
    made.verification.close()
    for ledger in made.ledgers:
        ledger.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_runs_of_visitors_are_followed_and_served(world: World) -> None:
    member = world.visitor("member", run_of(CHAIN), ROUNDS)
    following = asyncio.create_task(world.runs.keep_following())
    # it asks for the manifest as a joiner does
    assert await world.received["member"].get() == encode(TipAsk(0, 0))
    await member.send(BOOT.peer_id, encode(signed(CHAIN)))
    await until(lambda: run_of(CHAIN) in world.runs.chains)
    await until(lambda: world.runs.chains[run_of(CHAIN)].num_certificates == ROUNDS)
    following.cancel()
    newcomer = world.visitor("newcomer", run_of(CHAIN))
    await newcomer.send(BOOT.peer_id, encode(TipAsk(0, 0)))
    assert await world.received["newcomer"].get() == encode(signed(CHAIN))
    (tip,) = await newcomer.ask(BOOT.peer_id, encode(TipQuestion()))
    assert decode_answer(tip) == Tip(0, ROUNDS, CHAIN.head.hash, 1)
    assert await newcomer.ask(BOOT.peer_id, encode(CertificatesQuestion(1, 3))) == tuple(CHAIN.certificates[:3])


async def test_a_peer_of_another_run_or_of_none_gets_nothing_of_this_one(world: World) -> None:
    await world.adopt(CHAIN, "member")
    for name, run in (("other", RunId(bytes(32))), ("none", None)):
        peer = world.visitor(name, run)
        await peer.send(BOOT.peer_id, encode(TipAsk(0, 0)))
        assert await peer.ask(BOOT.peer_id, encode(TipQuestion())) == ()
        assert world.received[name].empty()


async def test_a_manifest_that_is_not_the_run_named_or_is_forged_is_not_kept(world: World) -> None:
    peer = world.visitor("liar", RunId(bytes(32)))
    await peer.send(BOOT.peer_id, encode(signed(CHAIN)))
    forged = replace_signature(signed(CHAIN))
    with pytest.raises(RemoteProtocolError):
        await world.runs.receive(peer.peer_id, encode(forged))
    with pytest.raises(RemoteProtocolError):
        await world.runs.receive(peer.peer_id, b"rubbish")
    with pytest.raises(RemoteProtocolError):
        await world.runs.answer(peer.peer_id, b"rubbish")
    assert not world.runs.chains


def replace_signature(run: SignedRun) -> SignedRun:
    return SignedRun(run.manifest, bytes(64))


async def test_certificates_that_no_quorum_signed_are_not_kept(world: World) -> None:
    liar = world.visitor("liar", run_of(CHAIN))
    bad = bytearray(CHAIN.certificates[0])
    bad[-1] ^= 1

    async def answer(asker: PeerId, question: bytes) -> list[bytes]:
        if question == encode(TipQuestion()):
            return [encode(Tip(0, 1, CHAIN.head.hash, 1))]
        return [bytes(bad)]

    liar.set_question_handler(answer)
    await liar.send(BOOT.peer_id, encode(signed(CHAIN)))
    chain = world.runs.chains[run_of(CHAIN)]
    await chain.follow((liar.peer_id,))
    assert (chain.num_certificates, chain.head.round) == (0, 0)


async def test_runs_that_nobody_visits_make_room_and_visited_ones_do_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "MAX_RUNS", 2)
    first, second, third = (other_chain(seed) for seed in (1, 2, 3))
    await world.adopt(first, "first")
    await world.adopt(second, "second")
    await world.adopt(third, "third")
    assert list(world.runs.chains) == [run_of(first), run_of(second)]
    del world.host.here[identity_of("first").peer_id]
    await world.adopt(third, "another of the third")
    assert list(world.runs.chains) == [run_of(second), run_of(third)]
    kept = {folder.name for folder in (world.folder / "runs").iterdir()}
    assert kept == {run_of(second).hex(), run_of(third).hex()}


async def test_what_was_kept_is_there_after_a_restart_and_what_is_damaged_is_forgotten(world: World) -> None:
    await world.adopt(CHAIN, "member")
    await world.adopt(other_chain(1), "other")
    await world.runs.close()
    (world.folder / "runs" / run_of(CHAIN).hex() / "run.manifest").write_bytes(b"x")
    world.runs = world.make_runs()
    await world.runs.load()
    assert list(world.runs.chains) == [run_of(other_chain(1))]
    assert not (world.folder / "runs" / run_of(CHAIN).hex()).exists()


async def test_a_chain_beyond_its_bounds_begins_anew_at_the_tip(world: World) -> None:
    member = world.visitor("member", run_of(CHAIN), ROUNDS)
    small = replace(world.following, max_rounds=20)
    chain = Chain(world.folder / "small", signed(CHAIN), small)
    await chain.follow((member.peer_id,))
    assert chain.num_certificates == ROUNDS
    await chain.follow((member.peer_id,))
    assert chain.num_certificates < 20
    assert chain.head.round == ROUNDS
    (tip,) = await chain.answer(member.peer_id, encode(TipQuestion()))
    assert decode_answer(tip) == Tip(0, ROUNDS, CHAIN.head.hash, ROUNDS)
    await chain.close()
    again = Chain.load(world.folder / "small", small)
    assert again.head.round == ROUNDS
    await again.close()


async def test_a_full_chain_that_nobody_can_shorten_is_served_as_it_is(world: World) -> None:
    member = world.visitor("member", run_of(CHAIN), ROUNDS)
    chain = Chain(world.folder / "small", signed(CHAIN), replace(world.following, max_rounds=20))
    await chain.follow((member.peer_id,))
    await chain.follow(())
    await chain.follow((member.peer_id,))  # not tried again at once
    assert (chain.num_certificates, chain.head.round) == (ROUNDS, ROUNDS)
    assert len(await chain.answer(member.peer_id, encode(CertificatesQuestion(1, 64)))) == ROUNDS
    await chain.delete()
    with pytest.raises(LocalStateError):
        Chain.load(world.folder / "small", world.following)


async def test_a_run_that_is_dropped_while_it_is_followed_does_no_harm(world: World) -> None:
    member = world.visitor("member", run_of(CHAIN), ROUNDS)
    asked = asyncio.Event()

    async def never(asker: PeerId, question: bytes) -> list[bytes]:
        asked.set()
        await asyncio.Event().wait()
        return []

    member.set_question_handler(never)
    await member.send(BOOT.peer_id, encode(signed(CHAIN)))
    following = asyncio.create_task(world.runs.keep_following())
    await asked.wait()
    chain = world.runs.chains[run_of(CHAIN)]
    await world.runs._drop(chain, "for a test")
    assert not world.runs.chains
    assert await chain.answer(member.peer_id, encode(TipQuestion())) == ()
    assert not following.done()
    following.cancel()


async def test_a_bug_while_following_ends_the_following(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.visitor("member", run_of(CHAIN), 0)

    async def broken(run: RunId, peers: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.runs, "_follow", broken)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(world.runs.keep_following(), 60)


def test_a_run_without_a_manifest_is_hurried_only_for_a_while() -> None:
    asyncio.run(hurry())


async def hurry() -> None:
    class Clockless(Runs):
        def __init__(self) -> None:
            self._chains = {}
            self._followed = {run_of(CHAIN): (0, 0.0)}
            self.num_started = 0

        def _start(self, name: str, work: object) -> None:
            self.num_started += 1

    runs = Clockless()
    for _ in range(100):
        runs._follow_if_due(run_of(CHAIN), ())
    assert runs.num_started == runs_module._NUM_HURRIED
