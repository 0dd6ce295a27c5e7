"""How fast voters come and go, and which quorum each certificate of that way needs."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.certificate import verify_certificate
from spes_p2p.protocol.codec import encode, sign
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Evidence, Leave
from spes_p2p.protocol.params import MAX_VOTERS
from spes_p2p.protocol.state import RosterRow
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    quick_config,
    transition_of,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

SEVEN = identities(7)


def alive(head: Head, *peers: Identity) -> list[Item]:
    return [item_of(alive_of(head, peer)) for peer in peers]


def leave(head: Head, peer: Identity) -> Item:
    return item_of(sign(peer, Leave(head.run.run_id, 0, head.round + 1, NO_DIGEST, 0)))


def certified(head: Head, items: list[Item], signers: list[Identity]) -> Head:
    """What a certificate with these signers makes. Raises RemoteProtocolError if they are no quorum."""
    certificate = certificate_of(head, body_of(head, transition_of(head, items)), signers)
    return verify_certificate(Terms(head), certificate, verify)


def sizes(head: Head) -> tuple[int, int]:
    terms = Terms(head)
    return len(terms.voters), terms.quorum


def test_founders_that_fall_silent_shrink_the_quorum_only_by_certificates_of_the_one_before() -> None:
    head, seen = owned_head(SEVEN), [sizes(owned_head(SEVEN))]
    for left in (5, 4, 3):  # as many fall silent each time as leave a quorum behind
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="make a quorum"):
                certified(head, alive(head, *SEVEN[:left]), SEVEN[: Terms(head).quorum - 1])
            head = certified(head, alive(head, *SEVEN[:left]), SEVEN[:left])
        seen.append(sizes(head))
    assert seen == [(7, 5), (5, 4), (4, 3), (3, 3)]
    with pytest.raises(RemoteProtocolError, match="2 signatures where 3 make a quorum"):
        certified(head, alive(head, *SEVEN[:2]), SEVEN[:2])  # with three voters none may be missing


def test_those_who_fell_silent_cannot_go_on_without_the_others() -> None:
    start = owned_head(SEVEN)
    gone = SEVEN[5:]
    with pytest.raises(RemoteProtocolError, match="2 signatures where 5"):
        certified(start, alive(start, *gone), gone)
    behind = certified(start, alive(start, *SEVEN[:5]), SEVEN[:5])
    with pytest.raises(RemoteProtocolError, match="2 signatures where 5"):
        certified(behind, alive(behind, *gone), gone)


def test_voters_may_leave_all_at_once_and_the_rest_is_a_quorum_of_itself() -> None:
    head = owned_head(SEVEN)
    items = [*alive(head, *SEVEN), *(leave(head, peer) for peer in SEVEN[2:])]
    after = certified(head, items, SEVEN[:5])
    assert sizes(after) == (2, 2)
    last = certified(after, [*alive(after, *SEVEN[:2]), leave(after, SEVEN[1])], SEVEN[:2])
    assert sizes(last) == (1, 1)


def test_equivocators_are_evicted_all_in_one_cut() -> None:
    head = owned_head(SEVEN)
    liars = SEVEN[5:]
    proofs = [[encode(update_of(head, liar, note=note)) for note in "ab"] for liar in liars]
    items = [item_of(sign(SEVEN[0], Evidence(head.run.run_id, 0, 2, *proof))) for proof in proofs]
    after = certified(head, [*alive(head, *SEVEN), *items], SEVEN[:5])
    assert sizes(after) == (5, 4)
    assert set(Terms(after).voters) == {peer.peer_id for peer in SEVEN[:5]}


def with_rows(head: Head, rows: list[RosterRow]) -> Head:
    return dataclasses.replace(
        head, state=msgspec.structs.replace(head.state, roster=tuple(sorted(rows, key=lambda row: row.peer)))
    )


def crowd(number: int, num_voters: int, *, open_run: bool = False) -> tuple[Head, list[Identity]]:
    """A head with one founder among so many qualified members, of whom so many vote."""
    config = quick_config(admission="open" if open_run else "invited")
    peers = [identity_of(f"member {place}") for place in range(number)]
    head = owned_head(peers[:1], config)
    rows = [RosterRow(peer.peer_id, 0, 10, 1, 1, 1 if place < num_voters else None) for place, peer in enumerate(peers)]
    return with_rows(head, rows), peers


@pytest.mark.parametrize(("num_voters", "num_new"), [(4, 1), (7, 1), (8, 2), (16, 4), (19, 4), (100, 25)])
@pytest.mark.parametrize("open_run", [True, False])
def test_voters_grow_by_a_quarter_at_most(num_voters: int, num_new: int, open_run: bool) -> None:
    head, peers = crowd(num_voters + 30, num_voters, open_run=open_run)
    after = follow(head, alive(head, *peers))
    assert len(Terms(after).voters) == num_voters + num_new
    assert {peer.peer_id for peer in peers[:num_voters]} <= set(Terms(after).voters)


def test_there_are_never_more_than_128_voters_and_those_who_vote_stay() -> None:
    head, peers = crowd(140, 120)
    after = follow(head, alive(head, *peers))
    assert len(Terms(after).voters) == MAX_VOTERS == 128
    assert {peer.peer_id for peer in peers[:120]} <= set(Terms(after).voters)
    again = follow(after, alive(after, *peers))
    assert Terms(again).voters == Terms(after).voters


def test_who_became_a_voter_is_told_by_its_row() -> None:
    head, peers = crowd(6, 5)
    after = follow(head, alive(head, *peers))
    since = {row.peer: row.voter_since for row in after.state.roster}
    assert since == {**{peer.peer_id: 1 for peer in peers[:5]}, peers[5].peer_id: 2}


def test_a_crowd_of_newcomers_has_neither_vote_nor_more_than_one_shard_each() -> None:
    head = owned_head(SEVEN[:4], quick_config(admission="open"), capacity=1)
    newcomers = [identity_of(f"sybil {place}") for place in range(20)]
    after = follow(head, [*alive(head, *SEVEN[:4]), *(item_of(join_of(head, peer, capacity=8)) for peer in newcomers)])
    assert len(after.state.members) == 24
    assert Terms(after).voters == tuple(peer.peer_id for peer in SEVEN[:4])
    assert Terms(after).eligible == Terms(after).voters
    assert {len(after.state.shards_of(peer.peer_id)) for peer in newcomers} <= {0, 1}


@pytest.mark.parametrize(("number", "quorum", "eligible"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 3, 4)])
def test_three_voters_or_fewer_need_every_one_of_them(number: int, quorum: int, eligible: int) -> None:
    terms = Terms(owned_head(SEVEN[:number]))
    assert (len(terms.voters), terms.quorum, len(terms.eligible)) == (number, quorum, eligible)
    assert (terms.num_faults, terms.replicas) == ((1, 2) if number == 4 else (0, 1))
    assert (terms.expert_acks, terms.psi_acks) == {1: (0, 0), 2: (1, 1), 3: (1, 1), 4: (2, 2)}[number]


def test_a_lone_voter_is_joined_by_members_for_acks_and_averages_only() -> None:
    head, peers = crowd(5, 1)
    head = with_rows(head, [msgspec.structs.replace(row, accepted=0) for row in head.state.roster])
    terms = Terms(head)
    assert (terms.voters, len(terms.eligible)) == ((peers[0].peer_id,), 3)
    assert peers[0].peer_id in terms.eligible
    assert (terms.quorum, terms.expert_acks, terms.psi_acks, terms.replicas) == (1, 1, 1, 1)
