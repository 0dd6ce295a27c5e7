"""A bootstrap node in this process, with real daemons: what it keeps of a run, whom it serves, where it is reached."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.bootstrap.metrics import sum_of
from spes_p2p.bootstrap.node import BootstrapNode
from spes_p2p.bootstrap.options import BootstrapOptions, has_ip6
from spes_p2p.crypto import verify
from spes_p2p.errors import TransportError
from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.network.p2p import RelayLimits
from spes_p2p.network.quotas import QuotaLimits
from spes_p2p.network.relaying import reserve
from spes_p2p.network.transport import NetworkOptions
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.joining import ManifestSeeker
from spes_p2p.node.resume import resume
from spes_p2p.node.stored import LAST_ROUND
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.codec import decode, decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun, TipAsk
from spes_p2p.protocol.questions import TipQuestion
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.chains import made_chain, store
from spes_p2p.testing.loopback import LoopbackPeer, LoopbackSwarm, loopback_swarm, until
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config
from spes_p2p.testing.swarm import identity_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LISTEN = "/ip4/127.0.0.1/tcp/0"
ROUNDS = 40
CHAIN = made_chain(4, quick_config(), NUM_PARTS).grow(ROUNDS)
RUN = CHAIN.genesis.run.run_id
SIGNED = SignedRun(CHAIN.genesis.run.manifest, identity_of("founder 0").sign("run", encode(CHAIN.genesis.run.manifest)))


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[LoopbackSwarm]:
    async with loopback_swarm(tmp_path) as made:
        yield made


@asynccontextmanager
async def bootstrap(options: BootstrapOptions) -> AsyncIterator[BootstrapNode]:
    node = await BootstrapNode.start(options)
    try:
        yield node
    finally:
        await node.close()


def of_run(*entrances: str) -> NetworkOptions:
    return NetworkOptions(identity_path=Path(), initial_peers=entrances, run=RUN)


def serve_chain(peer: LoopbackPeer, ledger: Ledger) -> None:
    """Answer as a member does."""
    sending: set[asyncio.Task[None]] = set()

    async def receive(sender: PeerId, data: bytes) -> None:
        if isinstance(decode(data, sender), TipAsk):
            task = asyncio.create_task(peer.transport.send(sender, encode(SIGNED)))
            sending.add(task)
            task.add_done_callback(sending.discard)

    store(ledger, CHAIN.genesis, [decode_certificate(data) for data in CHAIN.certificates])
    peer.transport.set_message_handler(receive)
    peer.transport.set_question_handler(ChainSource(ledger, CHAIN.genesis).answer)


async def catch_up(peer: LoopbackPeer, ledger: Ledger) -> list[int]:
    """Rounds that a newcomer has after it asked its bootstrap nodes, and nobody else."""
    verification = Verification(verify, 1)
    around = Surroundings(
        ledger=ledger,
        transport=peer.transport,
        verification=verification,
        clock=MonotonicClock(),
        notify=lambda level, text: None,
        waiting=lambda text: None,
    )
    place = resume(ledger, CHAIN.genesis, None, peer.identity.peer_id)
    await CatchUp(place, around).run(peer.transport.entry_peers)
    verification.close()
    return [entry.round for entry in ledger.range(RoundNumber(0), LAST_ROUND)]


async def page(node: BootstrapNode, path: str, host: str | None = None) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        request = urllib.request.Request(f"{node.http_url}{path}", headers={} if host is None else {"Host": host})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_a_newcomer_gets_manifest_and_certificates_while_no_member_answers(
    tmp_path: Path, swarm: LoopbackSwarm
) -> None:
    options = BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,))
    ledgers = [Ledger(tmp_path / name / "ledger.sqlite") for name in ("member", "newcomer", "late")]
    async with bootstrap(options) as node:
        (address,) = await node.addresses()
        member = await swarm.start(1, of_run(address))
        serve_chain(member, ledgers[0])

        async def is_cached() -> bool:
            return sum_of(await node.metrics(), "spes_bootstrap_round") == ROUNDS

        await until(is_cached)
        await member.transport.close()
        newcomer = await swarm.start(2, of_run(address))
        seeker = ManifestSeeker(RUN, newcomer.transport, entries=newcomer.transport.entry_peers)
        newcomer.transport.set_message_handler(seeker.receive)
        assert await seeker.seek(lambda level, text: None, timeout_s=60) == SIGNED
        assert await catch_up(newcomer, ledgers[1]) == list(range(1, ROUNDS + 1))

        status, text = await page(node, "/metrics")
        assert status == 200
        figures = {name: sum_of(text, f"spes_bootstrap_{name}") for name in ("manifests", "certificates", "peers")}
        assert figures == {"manifests": 1, "certificates": ROUNDS, "peers": 1}
        assert sum_of(text, "spes_bootstrap_relayed_bytes_total") == 0
        assert (sum_of(text, "spes_bootstrap_served_bytes_total") or 0) > 10_000
        status, health = await page(node, "/health")
        assert (status, json.loads(health)["runs"]) == (200, [RUN.hex()])
        assert (await page(node, "/health", host="evil.example"))[0] == 421
    # what it has kept outlives it, and so does its address
    async with bootstrap(options) as node:
        assert await node.addresses() == (address,)
        late = await swarm.start(3, of_run(address))
        assert await catch_up(late, ledgers[2]) == list(range(1, ROUNDS + 1))
    for ledger in ledgers:
        ledger.close()


async def test_who_takes_part_in_no_run_or_an_unknown_one_is_told_nothing(tmp_path: Path, swarm: LoopbackSwarm) -> None:
    async with bootstrap(BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,), metrics="off")) as node:
        (address,) = await node.addresses()
        assert node.http_url is None
        for number, run in ((1, None), (2, RUN)):
            peer = await swarm.start(number, replace(of_run(address), run=run))
            (entry,) = peer.transport.entry_peers
            assert await peer.transport.ask(entry, encode(TipQuestion())) == ()
            await peer.transport.send(entry, encode(TipAsk(0, 0)))


async def test_a_peer_beyond_its_quota_is_refused_and_counted(tmp_path: Path, swarm: LoopbackSwarm) -> None:
    few = QuotaLimits(peer_requests_per_s=1.0)
    async with bootstrap(BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,), quotas=few)) as node:
        (address,) = await node.addresses()
        peer = await swarm.start(1, of_run(address))
        (entry,) = peer.transport.entry_peers
        with pytest.raises(TransportError, match="busy"):
            for _ in range(30):
                await peer.transport.ask(entry, encode(TipQuestion()))
        assert (sum_of(await node.metrics(), "spes_bootstrap_refused_requests_total") or 0) > 0


async def test_every_kind_of_address_leads_to_it(tmp_path: Path, swarm: LoopbackSwarm) -> None:
    listen = (LISTEN, "/ip4/127.0.0.1/udp/0/quic-v1")
    if has_ip6():
        listen += ("/ip6/::1/tcp/0", "/ip6/::1/udp/0/quic-v1")
    async with bootstrap(BootstrapOptions(data_dir=tmp_path / "boot", listen=listen)) as node:
        addresses = await node.addresses()
        assert len(addresses) == len(listen)
        assert addresses[0].startswith("/ip4/127.0.0.1/tcp/")
        port = addresses[0].split("/")[4]
        assert {address.split("/")[4] for address in addresses} == {port}
        name = f"/dns4/localhost/tcp/{port}/p2p/{addresses[0].rsplit('/', 1)[1]}"
        for number, address in enumerate((*addresses, name), start=1):
            # raises UnreachableError if it is not met
            await swarm.start(number, of_run(address))
        assert len(node.transport.visitors) == len(addresses) + 1


async def test_it_relays_by_our_limits_says_so_and_counts_what_it_passes_on(
    tmp_path: Path, swarm: LoopbackSwarm
) -> None:
    async with bootstrap(BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,))) as node:
        (address,) = await node.addresses()
        alice = await swarm.start(1, of_run(address))
        (entry,) = alice.transport.entry_peers
        assert await reserve(alice.transport.daemon, entry) == RelayLimits(num_bytes=4 << 30, duration_s=1800)
        assert node.health()["relay"] == {"bytes": 4 << 30, "seconds": 1800}
        assert sum_of(await node.metrics(), "spes_bootstrap_relay_limit_bytes") == 4 << 30
        bob = await swarm.start(2, NetworkOptions(identity_path=Path()))  # who knows nobody
        await bob.transport.daemon.dial(alice.identity.peer_id, [f"{address}/p2p-circuit"], timeout_s=60)
        assert (sum_of(await node.metrics(), "spes_bootstrap_relayed_bytes_total") or 0) > 100


async def test_announced_names_are_what_it_prints(tmp_path: Path) -> None:
    names = ("/dns4/boot.example.org/tcp/31337", "/dns6/boot.example.org/udp/31337/quic-v1")
    options = BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,), announce=names)
    async with bootstrap(options) as node:
        assert [address.split("/p2p/")[0] for address in await node.addresses()] == list(names)


async def test_a_metrics_port_in_use_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    from spes_p2p.errors import MachineError
    from spes_p2p.storage.lock import FolderLock

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = BootstrapOptions(data_dir=tmp_path / "boot", listen=(LISTEN,), metrics=f"127.0.0.1:{port}")
        with pytest.raises(MachineError, match=f"port {port}"):
            await BootstrapNode.start(options)
    FolderLock(tmp_path / "boot").close()
