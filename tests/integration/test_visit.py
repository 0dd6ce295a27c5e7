"""A visitor over real daemons: what it sees of a run is verified, and nobody takes it for a joiner.

The member is a transport that answers from a ledger, as a node does, with a chain that was made up and really signed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from spes_p2p.client.doctor import network as doctor
from spes_p2p.crypto import Identity
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.link import InviteLink
from spes_p2p.network.transport import NetworkOptions
from spes_p2p.node import visit
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.outlook import crowd_with_one_more, pace_of
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.visit import LAST_CERTIFICATES, look, visiting, watch_rounds
from spes_p2p.protocol.codec import decode, decode_certificate, encode
from spes_p2p.protocol.head import genesis_head, next_head
from spes_p2p.protocol.messages import SignedRun, TipAsk
from spes_p2p.protocol.questions import TipQuestion, decode_question
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.loopback import LoopbackPeer, loopback_swarm, until
from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.swarm import identity_of

pytestmark = pytest.mark.live

ROUNDS = 20
BOOTSTRAP, MEMBER = 9, 1


@dataclass
class Place:
    """A run with an entry point and one member that is online."""

    chain: MadeChain
    link: InviteLink
    ledger: Ledger
    member: LoopbackPeer
    num_tips_asked: int = 0

    def certify(self) -> None:
        """One round more, which the member has."""
        before = self.chain.head
        self.chain.grow(1)
        store(self.ledger, before, [decode_certificate(self.chain.certificates[-1])])


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    config = quick_config()
    chain = made_chain(4, config, piece_sizes(config).num_parts).grow(ROUNDS)
    manifest = chain.genesis.run.manifest
    signed = SignedRun(manifest, chain.peers[manifest.created_by].sign("run", encode(manifest)))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    store(ledger, chain.genesis, [decode_certificate(data) for data in chain.certificates])
    run = RunId(chain.genesis.run.run_id)
    async with loopback_swarm(tmp_path / "swarm") as swarm:
        bootstrap = await swarm.start(BOOTSTRAP, NetworkOptions(identity_path=Path(), relay=True))
        entrance = (await bootstrap.transport.addresses())[0]
        member = await swarm.start(MEMBER, NetworkOptions(identity_path=Path(), initial_peers=(entrance,), run=run))
        answering: set[asyncio.Task[None]] = set()

        async def receive(sender: PeerId, data: bytes) -> None:
            if isinstance(decode(data, sender), TipAsk):
                task = asyncio.create_task(member.transport.send(sender, encode(signed)))
                answering.add(task)
                task.add_done_callback(answering.discard)

        member.transport.set_message_handler(receive)
        genesis = genesis_head(manifest, piece_sizes(config))
        source = ChainSource(ledger, genesis)

        async def answer(asker: PeerId, data: bytes) -> Sequence[bytes]:
            frames = await source.answer(asker, data)
            here.num_tips_asked += isinstance(decode_question(data), TipQuestion)
            return frames

        async def is_announced() -> bool:
            return len(await member.transport.discovery.find(run)) == 1

        await until(is_announced)
        link = InviteLink(run=run, bootstrap=(entrance,), invite_seed=identity_of("invite").seed)
        here = Place(chain=chain, link=link, ledger=ledger, member=member)
        member.transport.set_question_handler(answer)
        yield here
        await asyncio.gather(*answering, return_exceptions=True)
    ledger.close()


async def test_a_visitor_sees_the_run_and_is_not_announced(place: Place) -> None:
    async with visiting(place.link) as transport:
        seen = await look(place.link, transport, lambda level, text: None)
        assert seen.head.hash == place.chain.head.hash
        assert [body.round for body in seen.bodies] == list(range(ROUNDS - LAST_CERTIFICATES + 1, ROUNDS + 1))
        pace = pace_of(seen.config, seen.head, seen.bodies)
        assert (pace.num_rounds, pace.num_updates) == (LAST_CERTIFICATES - 1, 4 * (LAST_CERTIFICATES - 1))
        assert crowd_with_one_more(seen.config, seen.head).num_members == 5

        watching = asyncio.create_task(watch_rounds(transport, seen, watch_s=60, enough=2))
        for _ in range(3):
            seen_by_now = place.num_tips_asked + 2  # the one under way may have been answered before

            async def is_seen(number: int = seen_by_now) -> bool:
                return watching.done() or place.num_tips_asked >= number

            await until(is_seen)
            place.certify()
        durations = await watching
        assert len(durations) >= 2 and all(0 < seconds < 60 for seconds in durations)
        hints = await place.member.transport.discovery.find(place.link.run)
        assert [hint.peer for hint in hints] == [place.member.identity.peer_id]


async def test_the_doctor_asks_the_entry_point_and_the_members(place: Place, tmp_path: Path) -> None:
    here = doctor.Place(folder=tmp_path / "new", listen=(), announce=(), is_running=False)
    found = {finding.check: finding for finding in await doctor.with_link(place.link, here)}
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(
        ("entry", "clock", "reach", "relay", "members", "admission"), "ok"
    )
    assert found["relay"].fact.startswith("1 of 1")
    assert "4 members, certified up to round 20" in found["members"].fact
    stranger = InviteLink(run=place.link.run, bootstrap=place.link.bootstrap)
    refused = {finding.check: finding for finding in await doctor.with_link(stranger, here)}["admission"]
    assert refused.status == "fail" and "no invite key" in refused.fact and refused.remedy
    assert not here.folder.exists()


async def test_a_dead_entry_point_is_a_line_and_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "REACH_TIMEOUT_S", 2.0)
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).text}"
    here = doctor.Place(folder=tmp_path / "new", listen=(), announce=(), is_running=False)
    found = await doctor.with_link(InviteLink(run=RunId(bytes(32)), bootstrap=(nobody,)), here)
    assert [(finding.check, finding.status) for finding in found] == [
        ("entry", "fail"),
        ("clock", "warn"),
        ("reach", "warn"),
    ]
    assert "port 1: Connection refused" in found[0].fact and "\n" not in found[0].fact


def test_bodies_that_do_not_lead_to_the_head_are_not_believed() -> None:
    from spes_p2p.node.visit import linked_back

    chain = made_chain(4, quick_config(), 4).grow(5)
    bodies = [decode_certificate(data).body for data in chain.certificates]
    assert linked_back(chain.head, bodies) == tuple(bodies)
    assert linked_back(chain.head, [*bodies[:2], *bodies[3:]]) == tuple(bodies[3:])
    head = next_head(chain.genesis, bodies[0])
    assert linked_back(head, bodies) == ()
