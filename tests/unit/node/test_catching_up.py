"""Catching up over the memory network, from ledgers with synthetic chains: what is followed, refused and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from spes_p2p.crypto import peer_text, verify
from spes_p2p.errors import TransportError
from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.resume import resume
from spes_p2p.node.stored import LAST_ROUND
from spes_p2p.node.verifying import Verification
from spes_p2p.ports import QuestionHandler
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.questions import (
    CertificatesQuestion,
    TablesQuestion,
    Tip,
    TipQuestion,
    WaypointQuestion,
    decode_question,
)
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.clock import VirtualClock
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config
from spes_p2p.testing.swarm import identity_of

ROUNDS = 200
CHAIN = made_chain(4, quick_config(), NUM_PARTS, turnover_every=20).grow(ROUNDS)
ME = identity_of("joiner")


class Around:
    """A joiner with its ledger, and peers that serve chains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork(Random(0))
        self.transport = MemoryTransport(self.network, ME.peer_id, MemoryBlobs())
        self.verification = Verification(verify, 2)
        self.clock = VirtualClock()
        self.ledgers: list[Ledger] = []
        self.ledger = self.open("joiner")
        self.peers: list[PeerId] = []
        self.notes: list[str] = []
        self.waits: list[str] = []

    def open(self, name: str) -> Ledger:
        ledger = Ledger(self.folder / name / "ledger.sqlite")
        self.ledgers.append(ledger)
        return ledger

    def peer(self, name: str, handler: QuestionHandler) -> PeerId:
        identity = identity_of(name)
        MemoryTransport(self.network, identity.peer_id, MemoryBlobs()).set_question_handler(handler)
        self.peers.append(identity.peer_id)
        return identity.peer_id

    def honest(self, name: str, num_rounds: int = ROUNDS, chain: MadeChain = CHAIN) -> ChainSource:
        """A peer that has the first rounds of a chain; returns its source, for others to play tricks with."""
        source = self.source(name, num_rounds, chain)
        self.peer(name, source.answer)
        return source

    def source(self, name: str, num_rounds: int = ROUNDS, chain: MadeChain = CHAIN) -> ChainSource:
        ledger = self.open(name)
        store(ledger, chain.genesis, [decode_certificate(data) for data in chain.certificates[:num_rounds]])
        return ChainSource(ledger, chain.genesis)

    async def catch_up(self, skip_rounds: int = 1_000, chain: MadeChain = CHAIN) -> CatchUp:
        place = resume(self.ledger, chain.genesis, None, ME.peer_id)
        around = Surroundings(
            ledger=self.ledger,
            transport=self.transport,
            verification=self.verification,
            clock=self.clock,
            notify=lambda level, text: self.notes.append(text),
            waiting=self.waits.append,
            skip_rounds=skip_rounds,
        )
        catching_up = CatchUp(place, around)
        await catching_up.run(self.peers)
        return catching_up

    def rounds(self) -> list[int]:
        return [entry.round for entry in self.ledger.range(RoundNumber(0), LAST_ROUND)]

    def named(self, peer: PeerId) -> str:
        """What the log says of a peer that is not believed."""
        return next(note for note in self.notes if peer_text(peer) in note)


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Around]:
    made = Around(tmp_path)
    yield made
    made.verification.close()
    for ledger in made.ledgers:
        ledger.close()


def claiming(source: ChainSource, tip: Tip) -> QuestionHandler:
    """An honest source but for its tip."""

    async def answer(asker: PeerId, data: bytes) -> Sequence[bytes]:
        if isinstance(decode_question(data, asker), TipQuestion):
            return [encode(tip)]
        return await source.answer(asker, data)

    return answer


# --- the whole chain -------------------------------------------------------------------------------------------------


async def test_a_late_joiner_loads_200_rounds_in_batches_and_stores_them_all(around: Around) -> None:
    for name in ("ada", "ben", "cleo"):
        around.honest(name)
    caught = await around.catch_up()
    assert caught.num_followed == ROUNDS
    assert around.rounds() == list(range(1, ROUNDS + 1))
    again = resume(around.ledger, CHAIN.genesis, None, ME.peer_id)
    assert again.head == CHAIN.head
    assert around.waits == [f"checking round {first} of 200" for first in (1, 65, 129, 193)]
    assert around.notes == ["checking round 1 of 200", "the chain is checked up to round 200"]


async def test_alone_nothing_is_waited_for_and_nothing_is_said(around: Around) -> None:
    await around.catch_up()
    assert (around.rounds(), around.notes) == ([], [])


async def test_the_highest_of_several_tips_is_followed(around: Around) -> None:
    around.honest("ada", 50)
    around.honest("ben", 120)
    around.honest("cleo", 90)
    await around.catch_up()
    assert around.rounds()[-1] == 120


async def test_nobody_leads_back_below_what_is_stored(around: Around) -> None:
    store(around.ledger, CHAIN.genesis, [decode_certificate(data) for data in CHAIN.certificates[:60]])
    around.honest("ada", 50)
    caught = await around.catch_up()
    assert (caught.num_followed, around.rounds()[-1]) == (0, 60)


async def test_a_joiner_that_was_killed_goes_on_where_it_was(around: Around) -> None:
    source = around.source("ada")
    asked: list[int] = []

    async def dies(asker: PeerId, data: bytes) -> Sequence[bytes]:
        question = decode_question(data, asker)
        if isinstance(question, CertificatesQuestion):
            asked.append(question.first)
            if question.first > 128:
                joining.cancel()
                await asyncio.Event().wait()
        return await source.answer(asker, data)

    around.peer("ada", dies)
    joining = asyncio.create_task(around.catch_up())
    with pytest.raises(asyncio.CancelledError):
        await joining
    stored = around.rounds()
    assert stored in ([], list(range(1, 65)), list(range(1, 129)))
    assert stored  # the batches before the kill are there
    asked.clear()
    around.peers.clear()
    around.honest("ben")
    caught = await around.catch_up()
    assert caught.num_followed == ROUNDS - len(stored)
    assert around.rounds() == list(range(1, ROUNDS + 1))


async def test_a_peer_that_disappears_in_the_middle_is_replaced(around: Around) -> None:
    source = around.source("ada")

    async def vanishes(asker: PeerId, data: bytes) -> Sequence[bytes]:
        question = decode_question(data, asker)
        if isinstance(question, CertificatesQuestion) and question.first > 64:
            raise TransportError("gone")
        return await source.answer(asker, data)

    around.peer("ada", vanishes)
    around.honest("ben", 190)
    await around.catch_up()
    assert around.rounds() == list(range(1, 191))
    assert any("another peer is asked" in note for note in around.notes)


# --- liars -----------------------------------------------------------------------------------------------------------


async def test_a_tip_that_does_not_exist_is_named_and_dropped(around: Around) -> None:
    liar = around.peer("liar", claiming(around.source("of liar", 30), Tip(0, 900, CHAIN.head.hash, 1)))
    around.honest("ada")
    await around.catch_up()
    assert around.rounds() == list(range(1, ROUNDS + 1))
    assert "on the way to round 900, it does not give the certificate of round" in around.named(liar)


async def test_a_tip_without_end_is_not_skipped_to(around: Around) -> None:
    liar = around.peer("liar", claiming(around.source("of liar", 30), Tip(0, 2**61, CHAIN.head.hash, 1)))
    around.honest("ada")
    await around.catch_up()
    assert around.rounds()[-1] == ROUNDS
    assert "it does not give the waypoint of round 2,305,843,009,213,693,952" in around.named(liar)


async def test_certificates_that_nobody_signed_are_refused_and_none_of_them_is_stored(around: Around) -> None:
    source = around.source("of liar")

    async def forges(asker: PeerId, data: bytes) -> Sequence[bytes]:
        frames = list(await source.answer(asker, data))
        if isinstance(decode_question(data, asker), CertificatesQuestion):
            frames = [frame[:-70] + bytes(60) + frame[-10:] for frame in frames]
        return frames

    liar = around.peer("liar", forges)
    await around.catch_up()
    assert around.rounds() == []
    assert "is not believed" in around.named(liar)
    around.honest("ada", 40)
    await around.catch_up()
    assert around.rounds()[-1] == 40


async def test_another_certificate_for_a_certified_round_is_a_lie(around: Around) -> None:
    liar = around.peer("liar", claiming(around.source("of liar", 60), Tip(0, 60, CHAIN.genesis.hash, 1)))
    around.honest("ada", 120)
    await around.catch_up()
    assert around.rounds()[-1] == 120
    assert "another certificate than the one that a quorum signed" in around.named(liar)


async def test_the_chain_of_another_run_is_refused(around: Around) -> None:
    other = made_chain(3, quick_config(), NUM_PARTS).grow(20)
    liar = around.peer("other", around.source("other", 20, other).answer)
    await around.catch_up()
    assert around.rounds() == []
    assert "another run" in around.named(liar)


@pytest.mark.parametrize("answer", [[], [b"nonsense"], [encode(TipQuestion())]])
async def test_nonsense_for_a_tip_is_no_tip(around: Around, answer: list[bytes]) -> None:
    async def babbles(asker: PeerId, data: bytes) -> Sequence[bytes]:
        return answer

    around.peer("babbler", babbles)
    around.honest("ada", 20)
    await around.catch_up()
    assert around.rounds()[-1] == 20


async def test_a_slow_peer_is_left_for_another(around: Around) -> None:
    source = around.source("slow")
    asked: list[int] = []

    async def dawdles(asker: PeerId, data: bytes) -> Sequence[bytes]:
        question = decode_question(data, asker)
        if isinstance(question, CertificatesQuestion):
            asked.append(question.first)
            around.clock.jump(11_000)
        return await source.answer(asker, data)

    around.peer("slow", dawdles)
    around.honest("ada", 150)
    await around.catch_up()
    assert around.rounds()[-1] == ROUNDS
    assert asked[0] == 1
    assert 151 in asked  # what only the slow one has
    assert not {129, 130} & set(asked)


# --- the skip rule ---------------------------------------------------------------------------------------------------


async def test_a_long_way_is_skipped_and_the_state_is_that_of_the_whole_chain(around: Around) -> None:
    for name in ("ada", "ben", "cleo"):
        around.honest(name)
    caught = await around.catch_up(skip_rounds=100)
    assert (caught.num_followed, around.rounds()) == (0, [ROUNDS])
    assert resume(around.ledger, CHAIN.genesis, None, ME.peer_id).head == CHAIN.head
    (gap,) = around.ledger.gaps()
    assert (gap.from_round, gap.to_round) == (0, ROUNDS)
    assert any("rounds 1 to 200 were skipped" in note for note in around.notes)


async def test_a_skipped_ledger_goes_on_and_serves_what_it_has(around: Around) -> None:
    around.honest("ada", 150)
    await around.catch_up(skip_rounds=100)
    around.honest("ben", ROUNDS)
    caught = await around.catch_up(skip_rounds=100)
    assert (caught.num_followed, around.rounds()) == (50, list(range(150, ROUNDS + 1)))
    source = ChainSource(around.ledger, CHAIN.genesis)
    (tip,) = await source.answer(ME.peer_id, encode(TipQuestion()))
    assert tip == encode(Tip(0, ROUNDS, CHAIN.head.hash, 150))
    assert await source.answer(ME.peer_id, encode(CertificatesQuestion(140, 20))) == []
    (kept,) = await source.answer(ME.peer_id, encode(WaypointQuestion(150)))
    assert kept == around.ledger.gaps()[0].waypoints[-1]
    assert await source.answer(ME.peer_id, encode(WaypointQuestion(149))) == []
    assert len(await source.answer(ME.peer_id, encode(WaypointQuestion(152)))) == 1
    assert len(await source.answer(ME.peer_id, encode(CertificatesQuestion(150, 64)))) == 51


async def test_wrong_tables_after_a_skip_are_refused_and_nothing_is_stored(around: Around) -> None:
    source = around.source("of liar")

    async def swaps(asker: PeerId, data: bytes) -> Sequence[bytes]:
        if isinstance(decode_question(data, asker), TablesQuestion):
            return await source.answer(asker, encode(TablesQuestion(ROUNDS - 1)))
        return await source.answer(asker, data)

    liar = around.peer("liar", swaps)
    await around.catch_up(skip_rounds=100)
    assert around.rounds() == []
    assert "tables of round 200 do not match their roots" in around.named(liar)


async def test_a_skip_to_another_certificate_than_the_claimed_one_is_refused(around: Around) -> None:
    liar = around.peer("liar", claiming(around.source("of liar"), Tip(0, ROUNDS, CHAIN.genesis.hash, 1)))
    await around.catch_up(skip_rounds=100)
    assert around.rounds() == []
    assert "it has another certificate than it claims" in around.named(liar)


async def test_who_skipped_is_no_liar_and_what_it_lacks_comes_from_others(around: Around) -> None:
    around.honest("ada", 150)
    await around.catch_up(skip_rounds=100)
    skipped = ChainSource(around.ledger, CHAIN.genesis)
    around.ledger, around.peers = around.open("second joiner"), []
    around.peer("skipped", skipped.answer)
    await around.catch_up()
    assert around.rounds() == []  # genesis is 150 rounds and a whole roster away
    assert not any("not believed" in note for note in around.notes)
    around.honest("ben", 120)
    await around.catch_up()
    assert around.rounds() == [*range(1, 121), 150]  # the rest by a skip
    assert not any("not believed" in note for note in around.notes)


# --- the source ------------------------------------------------------------------------------------------------------


async def test_a_source_without_a_round_names_genesis_as_its_tip(around: Around) -> None:
    source = ChainSource(around.ledger, CHAIN.genesis)
    assert await source.answer(ME.peer_id, encode(TipQuestion())) == [encode(Tip(0, 0, CHAIN.genesis.hash, 0))]
    for question in (CertificatesQuestion(1, 5), WaypointQuestion(1), WaypointQuestion(0), TablesQuestion(7)):
        assert await source.answer(ME.peer_id, encode(question)) == []


async def test_any_old_round_is_answered_from_the_nearest_tables(around: Around) -> None:
    source = around.source("ada")
    for number in (2, 16, 17, 18, 100, ROUNDS):
        (frame,) = await source.answer(ME.peer_id, encode(TablesQuestion(number)))
        assert len(frame) > 100
        assert len(await source.answer(ME.peer_id, encode(WaypointQuestion(number)))) == 1
    assert await source.answer(ME.peer_id, encode(WaypointQuestion(ROUNDS + 1))) == []
