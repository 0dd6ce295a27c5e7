import msgspec

from spes_p2p.crypto import Identity
from spes_p2p.protocol import election
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.leases import next_leases
from spes_p2p.protocol.messages import Leave
from spes_p2p.protocol.state import LeaseRow
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefusalReason
from spes_p2p.testing.protocol_cases import (
    alive_of,
    claim_of,
    follow,
    genesis_of,
    identities,
    item_of,
    join_of,
    owned_head,
    receipt_of,
    trained_items,
    transition_of,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
FOUR = owned_head(PEERS)
X = identity_of("x")


def alive(head: Head, *peers: Identity) -> list[Item]:
    return [item_of(alive_of(head, peer)) for peer in peers]


def owners(head: Head) -> list[tuple[bytes, ...]]:
    return [head.state.owners(shard) for shard in range(8)]


def counts(head: Head) -> list[int]:
    return sorted(len(head.state.shards_of(peer)) for peer in head.state.members)


def test_at_genesis_every_shard_is_vacant_and_the_first_certificate_names_the_owners() -> None:
    assert owners(genesis_of(PEERS)) == [()] * 8
    assert counts(FOUR) == [2, 2, 2, 2]
    assert {tenure.begun for row in FOUR.state.leases for tenure in row.owners} == {1}


def test_a_vacant_shard_goes_to_the_lowest_hash_among_the_claimers() -> None:
    genesis = genesis_of(PEERS)
    head = follow(genesis, [item_of(claim_of(genesis, peer, 8)) for peer in PEERS])
    seed, ids = Terms(genesis).seed, [peer.peer_id for peer in PEERS]
    assert owners(head) == [(election.claim_order(seed, shard, ids)[0],) for shard in range(8)]


def test_the_order_of_arrival_does_not_matter() -> None:
    genesis = genesis_of(PEERS)
    claims = [item_of(claim_of(genesis, peer, 3)) for peer in PEERS]
    assert follow(genesis, claims).hash == follow(genesis, claims[::-1]).hash


def test_capacity_is_kept_and_the_rest_are_orphans() -> None:
    genesis = genesis_of(PEERS)
    head = follow(genesis, [item_of(claim_of(genesis, peer, 1)) for peer in PEERS])
    assert counts(head) == [1, 1, 1, 1]
    assert owners(head).count(()) == 4


def test_an_owner_without_an_update_keeps_its_shard_for_the_lease_and_no_longer() -> None:
    head = FOUR
    mine = head.state.shards_of(PEERS[0].peer_id)
    head = follow(head, [*alive(head, PEERS[0]), *trained_items(head, PEERS[1:])])
    assert head.state.shards_of(PEERS[0].peer_id) == mine
    head = follow(head, [*alive(head, PEERS[0]), *trained_items(head, PEERS[1:])])
    begun = {tenure.begun for shard in mine for tenure in head.state.leases[shard].owners}
    assert begun <= {head.round}


def test_an_accepted_update_renews_the_lease() -> None:
    head = FOUR
    for _ in range(4):
        head = follow(head, trained_items(head, PEERS))
    assert owners(head) == owners(FOUR)
    assert {tenure.last for row in head.state.leases for tenure in row.owners} == {5}


def test_a_late_update_renews_the_lease() -> None:
    late = update_of(FOUR, PEERS[0])
    head = follow(FOUR, [*alive(FOUR, PEERS[0]), *trained_items(FOUR, PEERS[1:])])
    head = follow(head, [item_of(late, receipt_of(late, PEERS)), *trained_items(head, PEERS[1:])])
    for shard in FOUR.state.shards_of(PEERS[0].peer_id):
        assert [(t.begun, t.last) for t in head.state.leases[shard].owners] == [(1, 3)]


def test_with_no_claimer_a_shard_goes_to_a_member_with_room_without_asking() -> None:
    head = owned_head(PEERS, capacity=4)
    leave = item_of(sign(PEERS[0], Leave(head.run.run_id, 0, 2, NO_DIGEST, 0)))
    after = follow(head, [leave, *trained_items(head, PEERS)])
    assert all(len(row) == 1 for row in owners(after))
    assert PEERS[0].peer_id not in after.state.members


def test_a_vacant_shard_goes_to_the_claimer_before_others_with_room() -> None:
    head = owned_head(PEERS, capacity=4)
    freed = head.state.shards_of(PEERS[0].peer_id)
    leave = item_of(sign(PEERS[0], Leave(head.run.run_id, 0, 2, NO_DIGEST, 0)))
    claim = item_of(claim_of(head, PEERS[1], 8))
    after = follow(head, [leave, claim, *trained_items(head, PEERS)])
    assert set(freed) <= set(after.state.shards_of(PEERS[1].peer_id))


def test_a_join_claims_with_its_cut_and_holds_one_shard_before_it_qualifies() -> None:
    head = owned_head(PEERS, capacity=1)
    after = follow(head, [*trained_items(head, PEERS), item_of(join_of(head, X, capacity=4))])
    assert len(after.state.shards_of(X.peer_id)) == 1
    assert owners(after).count(()) == 3
    # one accepted update later it may hold as many as it wants
    final = follow(after, [*trained_items(after, [*PEERS, X]), item_of(claim_of(after, X, 4))])
    assert len(final.state.shards_of(X.peer_id)) == 4


def test_with_nothing_vacant_the_richest_owner_gives_up_its_highest_shard() -> None:
    genesis = genesis_of(PEERS[:2])
    head = follow(genesis, [item_of(claim_of(genesis, PEERS[0], 8)), item_of(claim_of(genesis, PEERS[1], 1))])
    rich = head.state.shards_of(PEERS[0].peer_id)
    assert len(rich) >= 7
    after = follow(head, [*trained_items(head, PEERS[:2]), item_of(join_of(head, X))])
    assert after.state.shards_of(X.peer_id) == (rich[-1],)
    assert after.state.shards_of(PEERS[0].peer_id) == rich[:-1]


def test_with_shards_spread_evenly_a_claimer_becomes_co_owner_where_the_fewest_are() -> None:
    eight = identities(8)
    head = owned_head(eight, capacity=1)
    after = follow(head, [*trained_items(head, eight), item_of(join_of(head, X))])
    (shard,) = after.state.shards_of(X.peer_id)
    assert len(after.state.owners(shard)) == 2
    seed = Terms(head).seed
    assert shard == min(range(8), key=lambda s: election.claim_weight(seed, s, X.peer_id))


def test_a_claimer_moves_one_shard_a_round() -> None:
    x, y = identity_of("x"), identity_of("y")
    eight = identities(8)
    head = owned_head(eight, capacity=1)
    after = follow(head, [*trained_items(head, eight), item_of(join_of(head, x)), item_of(join_of(head, y))])
    assert [len(after.state.shards_of(peer.peer_id)) for peer in (x, y)] == [1, 1]


def test_a_claim_that_nothing_was_vacant_for_is_carried_with_its_reason() -> None:
    transition = transition_of(FOUR, [*trained_items(FOUR, PEERS), item_of(claim_of(FOUR, PEERS[0], 5))])
    (remark,) = transition.carried
    assert remark.reason is RefusalReason.NOTHING_VACANT
    assert transition.entries[remark.entry].kind is ItemKind.CLAIM


def test_leases_do_not_depend_on_the_order_in_which_sets_are_walked() -> None:
    terms = Terms(FOUR)
    emptied = msgspec.structs.replace(FOUR.state, leases=tuple(LeaseRow(shard, ()) for shard in range(8)))
    peers = [peer.peer_id for peer in PEERS]
    first, _ = next_leases(terms, emptied.roster, {}, frozenset(peers))
    second, _ = next_leases(terms, emptied.roster, {}, frozenset(reversed(peers)))
    assert first == second
