"""Heads of any round from what a ledger keeps."""

from __future__ import annotations

import pytest

from spes_p2p.errors import LocalStateError
from spes_p2p.ids import RoundNumber
from spes_p2p.node.resume import Checkpoint, resume
from spes_p2p.node.stored import TABLES_EVERY, Jump, Step, StoredChain, entry_of, tables_of, walk
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.storage.ledger import Gap, Ledger
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

ROUNDS = 80


def chain_of(num_voters: int, num_rounds: int) -> MadeChain:
    chain = made_chain(num_voters, quick_config(), NUM_PARTS, turnover_every=7)
    chain.keep_heads = True
    return chain.grow(num_rounds)


CHAIN = chain_of(4, ROUNDS)
CERTIFICATES = [decode_certificate(data) for data in CHAIN.certificates]
ME = CHAIN.genesis.state.members[0]


def at(number: int) -> Checkpoint:
    """Of a trainer that has loaded what a round made."""
    return Checkpoint(round=number + 1, base=CHAIN.heads[number].hash)


def skip(ledger: Ledger, from_round: int, to_round: int) -> None:
    waypoints = (encode(CHAIN.waypoint(to_round)),)
    gap = Gap(epoch=0, from_round=RoundNumber(from_round), to_round=RoundNumber(to_round), waypoints=waypoints)
    ledger.skip(gap, entry_of(CERTIFICATES[to_round - 1]), tables_of(CHAIN.heads[to_round], always=True))


def test_every_head_is_that_of_the_chain_and_others_are_not_here(ledger: Ledger) -> None:
    store(ledger, CHAIN.genesis, CERTIFICATES)
    stored = StoredChain(ledger, CHAIN.genesis)
    assert stored.head(0) == CHAIN.genesis
    assert [stored.head(number) for number in range(1, ROUNDS + 1)] == [CHAIN.heads[n] for n in range(1, ROUNDS + 1)]
    assert stored.head(ROUNDS + 1) is None
    assert stored.head(10**9) is None
    assert stored.nearest(TABLES_EVERY - 1) == CHAIN.genesis
    assert stored.nearest(2 * TABLES_EVERY + 3) == CHAIN.heads[2 * TABLES_EVERY]


def test_a_head_after_a_gap_knows_the_fencing_tokens_before_it(ledger: Ledger) -> None:
    store(ledger, CHAIN.genesis, CERTIFICATES[:3])
    skip(ledger, 3, 40)
    stored = StoredChain(ledger, CHAIN.genesis)
    assert stored.nearest(50) == stored.head(40) == CHAIN.heads[40]
    assert stored.head(20) is None
    assert stored.head(41) is None
    store(ledger, CHAIN.heads[40], CERTIFICATES[40:42])
    assert stored.head(42) == CHAIN.heads[42]


def test_a_walk_steps_and_jumps(ledger: Ledger) -> None:
    store(ledger, CHAIN.genesis, CERTIFICATES[:2])
    skip(ledger, 2, 20)
    store(ledger, CHAIN.heads[20], CERTIFICATES[20:21])
    found = list(walk(ledger, CHAIN.genesis))
    assert [type(step) for step in found] == [Step, Step, Jump, Step]
    assert [step.after for step in found] == [CHAIN.heads[number] for number in (1, 2, 20, 21)]
    assert list(walk(ledger, CHAIN.heads[20])) == found[3:]


def test_a_checkpoint_from_before_a_gap_is_of_no_use(ledger: Ledger) -> None:
    store(ledger, CHAIN.genesis, CERTIFICATES[:2])
    skip(ledger, 2, 20)
    begin = resume(ledger, CHAIN.genesis, at(2), ME).newest()
    assert (begin.head, begin.certificate, begin.since) == (CHAIN.heads[20], CERTIFICATES[19], None)
    begin = resume(ledger, CHAIN.genesis, at(20), ME).newest()
    assert begin.since is not None and begin.since.before == CHAIN.heads[20]


def test_a_long_ledger_is_resumed_from_its_tables_and_the_checkpoint_gets_what_happened_since(ledger: Ledger) -> None:
    store(ledger, CHAIN.genesis, CERTIFICATES)
    me = CHAIN.head.state.members[0]
    begin = resume(ledger, CHAIN.genesis, at(69), me).newest()
    assert (begin.head, begin.certificate) == (CHAIN.head, CERTIFICATES[-1])
    assert begin.since is not None and begin.since.before == CHAIN.heads[69]
    assert resume(ledger, CHAIN.genesis, None, me).newest().since is None


def test_tables_of_another_run_or_damaged_ones_are_named_with_their_round(ledger: Ledger) -> None:
    other = chain_of(3, TABLES_EVERY)
    store(ledger, other.genesis, [decode_certificate(data) for data in other.certificates])
    with pytest.raises(LocalStateError, match="does not fit its run at round 16: it is of another run"):
        StoredChain(ledger, CHAIN.genesis).nearest(99)


def test_damaged_tables_are_named_with_their_round(ledger: Ledger) -> None:
    entries = [(entry_of(one), b"nonsense" if one.body.round == 5 else b"") for one in CERTIFICATES[:6]]
    ledger.extend(entries)
    with pytest.raises(LocalStateError, match="does not fit its run at round 5: malformed"):
        StoredChain(ledger, CHAIN.genesis).nearest(5)


def test_a_gap_without_its_tables_is_named_with_its_round(ledger: Ledger) -> None:
    gap = Gap(epoch=0, from_round=RoundNumber(0), to_round=RoundNumber(9), waypoints=(encode(CHAIN.waypoint(9)),))
    ledger.skip(gap, entry_of(CERTIFICATES[8]), b"")
    with pytest.raises(LocalStateError, match="round 9: the tables on the far side"):
        list(walk(ledger, CHAIN.genesis))
