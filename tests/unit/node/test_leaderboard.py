"""The leaderboard is a function of the final certificates: any two peers make the same of the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.node.audit import audit
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.leaderboard import Leaderboard, Link, receipts_of
from spes_p2p.node.stored import TIP_META, entry_of, tables_of
from spes_p2p.protocol.body import Certificate, Remark
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.wire import RefusalReason
from spes_p2p.storage.ledger import Gap, Ledger
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.chains import MadeChain, made_chain, store

ROUNDS = 40


def made(turnover_every: int = 15) -> MadeChain:
    chain = made_chain(4, cases.quick_config(), cases.NUM_PARTS, turnover_every=turnover_every)
    chain.keep_heads = True
    return chain.grow(ROUNDS)


CHAIN = made()
CERTIFICATES = [decode_certificate(data) for data in CHAIN.certificates]


def resigned(chain: MadeChain, number: int) -> Certificate:
    """The certificate of a round with the signatures of another quorum."""
    before = chain.heads[number - 1] if number > 1 else chain.genesis
    chain_there = MadeChain(before, chain.peers)
    signers = [chain.peers[peer] for peer in before.state.voters[1:]]
    return chain_there.certify(CERTIFICATES[number - 1].body, signers)


def put_run(folder: Path, chain: MadeChain = CHAIN) -> Ledger:
    folder.mkdir()
    manifest = chain.genesis.run.manifest
    signature = chain.peers[manifest.created_by].sign("run", encode(manifest))
    (folder / MANIFEST_FILE).write_bytes(encode(SignedRun(manifest, signature)))
    return Ledger(folder / LEDGER_FILE)


def board_of(folder: Path, last: int | None = None) -> Leaderboard:
    board = Leaderboard(last)
    assert audit(folder, board.add).problem is None
    return board


def rows(board: Leaderboard) -> list[tuple[object, ...]]:
    return [
        (row.rank, row.peer, row.given.tokens, row.given.updates, row.given.rounds, sorted(row.given.shards))
        for row in board.standings()
    ]


def links(certificates: Sequence[Certificate], genesis: Head) -> list[Link]:
    head, found = genesis, []
    for certificate in certificates:
        after = next_head(head, certificate.body)
        found.append((head, certificate.body, after))
        head = after
    return found


@pytest.mark.parametrize("last", [None, 7])
def test_two_peers_with_other_signatures_and_other_ways_make_the_same_board(tmp_path: Path, last: int | None) -> None:
    one = put_run(tmp_path / "one")
    store(one, CHAIN.genesis, CERTIFICATES)
    one.close()
    two = put_run(tmp_path / "two")
    store(two, CHAIN.genesis, [resigned(CHAIN, number) for number in range(1, ROUNDS + 1)])
    two.close()
    boards = [board_of(tmp_path / name, last) for name in ("one", "two")]
    assert boards[0].rounds == boards[1].rounds == (1 if last is None else ROUNDS - 6, ROUNDS)
    assert rows(boards[0]) == rows(boards[1])
    assert sum(row.given.updates for row in boards[0].standings()) == 4 * (last or ROUNDS)


def test_a_peer_that_skipped_rounds_agrees_on_those_that_both_count(tmp_path: Path) -> None:
    whole = put_run(tmp_path / "whole")
    store(whole, CHAIN.genesis, CERTIFICATES)
    whole.close()
    part = put_run(tmp_path / "part")
    store(part, CHAIN.genesis, CERTIFICATES[:5])
    gap = Gap(epoch=0, from_round=RoundNumber(5), to_round=RoundNumber(20), waypoints=(encode(CHAIN.waypoint(20)),))
    part.skip(gap, entry_of(CERTIFICATES[19]), tables_of(CHAIN.heads[20], always=True))
    store(part, CHAIN.heads[20], CERTIFICATES[20:])
    part.close()
    assert rows(board_of(tmp_path / "part", 15)) == rows(board_of(tmp_path / "whole", 15))
    assert board_of(tmp_path / "part").rounds == (21, ROUNDS)
    assert rows(board_of(tmp_path / "part")) == rows(board_of(tmp_path / "whole", 20))


def test_tentative_rounds_count_once_they_are_final() -> None:
    founders = sorted(cases.identities(3), key=lambda peer: peer.peer_id)
    genesis = cases.genesis_of(founders)
    first, after_first = cases.round_of(genesis, founders)
    tentative, tip = cases.round_of(after_first, founders[:2], tentative=True)
    final, end = cases.round_of(tip, founders)
    board = Leaderboard()
    board.add(genesis, first.body, after_first)
    board.add(after_first, tentative.body, tip)
    assert board.rounds == (1, 1)
    assert [row.given.rounds for row in board.standings()] == [1, 1, 1]
    board.add(tip, final.body, end)
    assert board.rounds == (1, 3)
    assert sum(row.given.rounds for row in board.standings()) == 3 + 2 + 3


def test_the_branch_that_a_peer_is_on_makes_no_difference(tmp_path: Path) -> None:
    founders = sorted(cases.identities(3), key=lambda peer: peer.peer_id)
    genesis = cases.genesis_of(founders)
    first, head = cases.round_of(genesis, founders)
    boards = []
    for number, side in enumerate((founders[:2], founders[1:])):
        certificate, tip = cases.round_of(head, side, tentative=True)
        folder = tmp_path / str(number)
        folder.mkdir()
        manifest = genesis.run.manifest
        creator = next(peer for peer in founders if peer.peer_id == manifest.created_by)
        signed = SignedRun(manifest, creator.sign("run", encode(manifest)))
        (folder / MANIFEST_FILE).write_bytes(encode(signed))
        ledger = Ledger(folder / LEDGER_FILE)
        for one, after in ((first, head), (certificate, tip)):
            ledger.append(entry_of(one), meta={TIP_META: bytes(after.hash)}, tables=tables_of(after))
        ledger.close()
        board = Leaderboard()
        assert audit(folder, board.add).num_tentative == 1
        boards.append(board)
    assert boards[0].rounds == boards[1].rounds == (1, 1)
    assert rows(boards[0]) == rows(boards[1])


def test_peers_that_gave_as_much_share_a_rank() -> None:
    board = Leaderboard(last=3)
    for link in links(CERTIFICATES, CHAIN.genesis):
        board.add(*link)
    assert [(row.rank, row.given.tokens) for row in board.standings()] == [(1, 3_000)] * 4
    everything = Leaderboard()
    for link in links(CERTIFICATES, CHAIN.genesis):
        everything.add(*link)
    assert [row.rank for row in everything.standings()] == [1, 1, 3, 4, 5, 6]


def test_a_receipt_says_what_a_certificate_says_of_a_peer() -> None:
    chain = made_chain(4, cases.quick_config(), cases.NUM_PARTS)
    refused = (Remark(0, RefusalReason.SUPERSEDED), Remark(1, RefusalReason.NOT_OWNER))
    certificate = chain.certify(structs.replace(chain.body(), refused=refused))
    chain_links = links([certificate], chain.genesis)
    members = chain.genesis.state.members
    first, second, third = (receipts_of(chain_links, peer)[0] for peer in members[:3])
    assert (first.verdict, first.tokens) == ("refused: superseded", 0)
    assert (second.verdict, second.tokens) == ("accepted, experts refused: not owner", 1_000)
    assert (third.verdict, third.tokens, third.items, third.round) == ("accepted", 1_000, ("update",), 1)
    assert third.shards == (2, 6)
    assert third.receipts_root == certificate.body.receipts_root


def test_receipts_begin_when_the_peer_appears_and_end_when_it_is_gone() -> None:
    newcomer = PeerId(CERTIFICATES[14].body.newcomers[0])
    numbers = [receipt.round for receipt in receipts_of(links(CERTIFICATES, CHAIN.genesis), newcomer)]
    assert numbers[0] == 16
    assert numbers == list(range(16, numbers[-1] + 1))
    assert receipts_of(links(CERTIFICATES, CHAIN.genesis), PeerId(bytes(32))) == []
