"""Catching up over tentative certificates and recoveries: what a final one is built on, and what leads nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from spes_p2p.crypto import verify
from spes_p2p.ids import PeerId
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.resume import Resumption, resume
from spes_p2p.node.stored import TIP_META, entry_of, tables_of
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol import skip
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.questions import CertificatesQuestion, Tip, TipQuestion, decode_question
from spes_p2p.protocol.recovery import recover, sign_recovery, verify_recovery
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.clock import VirtualClock
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.swarm import identity_of

FOUNDERS = sorted(cases.identities(3), key=lambda peer: peer.peer_id)
KEY = next(peer for peer in FOUNDERS if peer.peer_id == cases.genesis_of(FOUNDERS).run.manifest.recovery_key)
GENESIS = cases.genesis_of(FOUNDERS)
ME = identity_of("joiner")
Made = tuple[Certificate, Head]


def certify(head: Head, side: tuple[int, ...] = ()) -> Made:
    return cases.round_of(head, [FOUNDERS[place] for place in side or (0, 1, 2)], tentative=bool(side))


def recovery(head: Head) -> Made:
    certificate = sign_recovery(recover(Terms(head), {FOUNDERS[0].peer_id, FOUNDERS[1].peer_id}), KEY)
    return certificate, verify_recovery(head, certificate, verify)


FIRST = certify(GENESIS)
BRANCH = [certify(FIRST[1], (0, 1))]
BRANCH.append(certify(BRANCH[0][1], (0, 1)))
DEAD_END = certify(FIRST[1], (1, 2))
NEXT = certify(BRANCH[1][1])
LAST = certify(NEXT[1])
CHAIN = [FIRST, *BRANCH, NEXT, LAST]


class Around:
    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork(Random(0))
        self.transport = MemoryTransport(self.network, ME.peer_id, MemoryBlobs())
        self.verification = Verification(verify, 2)
        self.folder = folder
        self.ledger = Ledger(folder / "joiner.sqlite")
        self.ledgers = [self.ledger]
        self.peers: list[PeerId] = []
        self.notes: list[str] = []

    def peer(self, name: str, chain: Sequence[Made], lie: Sequence[Made] = (), tip: Tip | None = None) -> None:
        """A peer with this chain. `lie`: what it gives when it is asked for certificates; `tip`: what it claims."""
        ledger = Ledger(self.folder / f"{name}.sqlite")
        self.ledgers.append(ledger)
        put(ledger, chain)
        source = ChainSource(ledger, GENESIS)

        async def answer(asker: PeerId, data: bytes) -> Sequence[bytes]:
            question = decode_question(data, asker)
            if isinstance(question, TipQuestion) and tip is not None:
                return [encode(tip)]
            if isinstance(question, CertificatesQuestion) and lie:
                return [encode(certificate) for certificate, head in lie if head.round >= question.first]
            return await source.answer(asker, data)

        identity = identity_of(name)
        MemoryTransport(self.network, identity.peer_id, MemoryBlobs()).set_question_handler(answer)
        self.peers.append(identity.peer_id)

    async def catch_up(self, skip_rounds: int = 1_000) -> Resumption:
        place = resume(self.ledger, GENESIS, None, ME.peer_id)
        around = Surroundings(
            ledger=self.ledger,
            transport=self.transport,
            verification=self.verification,
            clock=VirtualClock(),
            notify=lambda level, text: self.notes.append(text),
            waiting=lambda text: None,
            skip_rounds=skip_rounds,
        )
        await CatchUp(place, around).run(self.peers)
        return place


def put(ledger: Ledger, chain: Sequence[Made]) -> None:
    for certificate, head in chain:
        ledger.append(entry_of(certificate), meta={TIP_META: bytes(head.hash)}, tables=tables_of(head))


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Around]:
    made = Around(tmp_path)
    yield made
    made.verification.close()
    for ledger in made.ledgers:
        ledger.close()


def not_believed(around: Around) -> list[str]:
    return [note for note in around.notes if "not believed" in note]


async def test_tentative_certificates_that_a_final_one_is_built_on_come_with_it(around: Around) -> None:
    around.peer("ada", CHAIN)
    place = await around.catch_up()
    assert place.head == LAST[1]
    assert resume(around.ledger, GENESIS, None, ME.peer_id).head == LAST[1]
    stored = around.ledger.by_hash(BRANCH[1][1].hash)
    assert stored is not None and not stored.final
    assert not_believed(around) == []


async def test_a_node_on_another_branch_follows_from_the_last_final_certificate_on(around: Around) -> None:
    put(around.ledger, [FIRST, DEAD_END])
    around.peer("ada", CHAIN)
    place = await around.catch_up()
    place.to_tip(around.ledger)
    assert place.head == LAST[1]
    assert not_believed(around) == []


async def test_the_own_tip_stays_while_nobody_has_anything_final_that_is_newer(around: Around) -> None:
    put(around.ledger, [FIRST, DEAD_END])
    around.peer("ada", [FIRST, *BRANCH])
    place = await around.catch_up()
    assert place.head == FIRST[1]
    place.to_tip(around.ledger)
    assert place.head == DEAD_END[1]


async def test_a_branch_that_leads_nowhere_costs_the_liar_its_word_and_the_way_begins_again(around: Around) -> None:
    liar_tip = Tip(0, 9, bytes(32), 1)
    around.peer("liar", CHAIN, lie=[FIRST, DEAD_END], tip=liar_tip)
    around.peer("ada", CHAIN)
    place = await around.catch_up()
    assert place.head == LAST[1]
    assert len(not_believed(around)) == 1


async def test_the_skip_rule_goes_over_tentative_rounds(around: Around) -> None:
    around.peer("ada", CHAIN)
    place = await around.catch_up(skip_rounds=2)
    assert (place.head, place.head.forked) == (LAST[1], LAST[1].forked)
    assert around.ledger.count() == 1
    assert not_believed(around) == []


async def test_where_a_round_half_way_has_no_final_certificate_the_whole_chain_is_followed_instead(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if all voters had changed on the way: only the next certificate is vouched for
    monkeypatch.setattr(skip, "vouches", lambda anchor, judged: judged.after.round == anchor.round + 1)
    around.peer("ada", CHAIN)
    place = await around.catch_up(skip_rounds=2)
    assert place.head == LAST[1]
    assert around.ledger.count() == 3
    assert not_believed(around) == []


async def test_a_recovery_is_followed_and_the_higher_epoch_wins(around: Around) -> None:
    recovered = recovery(BRANCH[1][1])
    after = cases.round_of(recovered[1], FOUNDERS[:2])
    around.peer("ada", [FIRST, *BRANCH, recovered, after])
    around.peer("ben", [FIRST])
    place = await around.catch_up()
    assert (place.head, place.head.epoch) == (after[1], 1)
    assert not_believed(around) == []
