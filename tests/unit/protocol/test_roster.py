import msgspec
import pytest

from spes_p2p.config import ProtocolConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Join, Leave
from spes_p2p.protocol.roster import admitted, invite_payload
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.testing.protocol_cases import (
    alive_of,
    claim_of,
    follow,
    genesis_of,
    identities,
    item_of,
    join_of,
    owned_head,
    quick_config,
    trained_items,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
FOUR = owned_head(PEERS)


def members(head: Head, *names: Identity) -> list[Item]:
    return [item_of(alive_of(head, peer)) for peer in names]


def joins(head: Head, number: int) -> tuple[list[Identity], list[Item]]:
    newcomers = [identity_of(f"newcomer {place}") for place in range(number)]
    return newcomers, [item_of(join_of(head, peer)) for peer in newcomers]


def grow(head: Head, number: int, *, rounds: int = 1) -> tuple[Head, list[Identity]]:
    """Let newcomers join and have one update accepted in each of so many rounds."""
    founders = [peer for peer in PEERS if peer.peer_id in head.run.manifest.founders]
    newcomers, items = joins(head, number)
    head = follow(head, [*members(head, *founders), *items])
    for _ in range(rounds):
        head = follow(head, trained_items(head, [*founders, *newcomers]))
    return head, newcomers


def test_founders_are_members_and_voters_from_genesis() -> None:
    head = genesis_of(PEERS)
    assert Terms(head).members == Terms(head).voters == tuple(peer.peer_id for peer in PEERS)
    assert Terms(head).live == {peer.peer_id for peer in PEERS}


def test_two_cuts_without_an_item_end_the_membership() -> None:
    once = follow(FOUR, members(FOUR, *PEERS[:3]))
    assert len(once.state.roster) == 4
    twice = follow(once, members(once, *PEERS[:3]))
    assert twice.state.members == tuple(peer.peer_id for peer in PEERS[:3])


def test_alive_without_an_update_keeps_roster_and_vote() -> None:
    head = FOUR
    for _ in range(5):
        head = follow(head, members(head, *PEERS))
    assert Terms(head).voters == tuple(peer.peer_id for peer in PEERS)


def test_a_cut_without_any_item_ends_nobodys_membership() -> None:
    head = FOUR
    for _ in range(3):
        head = follow(head, [])
    assert len(head.state.roster) == 4


def test_one_that_fell_silent_may_return_with_the_same_identity() -> None:
    head = FOUR
    for _ in range(2):
        head = follow(head, members(head, *PEERS[:3]))
    back = follow(head, [*members(head, *PEERS[:3]), item_of(join_of(head, PEERS[3]))])
    row = back.state.row(PEERS[3].peer_id)
    assert row is not None
    assert (row.accepted, row.voter_since) == (0, back.round)


def test_a_leave_takes_effect_with_its_certificate() -> None:
    leave = item_of(sign(PEERS[0], Leave(FOUR.run.run_id, 0, 2, NO_DIGEST, 0)))
    after = follow(FOUR, [*members(FOUR, *PEERS), leave])
    assert PEERS[0].peer_id not in after.state.members
    assert len(Terms(after).voters) == 3


def test_the_last_member_may_leave_and_the_terms_still_make_sense() -> None:
    head = owned_head(PEERS[:1])
    after = follow(head, [item_of(sign(PEERS[0], Leave(head.run.run_id, 0, 2, NO_DIGEST, 0)))])
    terms = Terms(after)
    assert (terms.members, terms.voters, terms.eligible, terms.replicas) == ((), (), (), 1)
    assert terms.transfer_budget_ms > 0


def test_a_lone_founder_keeps_the_vote_until_four_voters_result() -> None:
    head, newcomers = grow(owned_head(PEERS[:1]), 2, rounds=3)
    assert Terms(head).voters == (PEERS[0].peer_id,)
    head, newcomers = grow(owned_head(PEERS[:1]), 3)
    assert Terms(head).voters == tuple(sorted(peer.peer_id for peer in (PEERS[0], *newcomers)))


def test_voters_grow_by_one_or_a_quarter_a_round() -> None:
    head, newcomers = grow(FOUR, 6)
    counts = [len(Terms(head).voters)]
    for _ in range(5):
        head = follow(head, trained_items(head, [*PEERS, *newcomers]))
        counts.append(len(Terms(head).voters))
    assert counts == [5, 6, 7, 8, 10, 10]


def test_in_an_open_run_ten_updates_come_before_a_vote() -> None:
    config = quick_config(admission="open")
    head, _ = grow(owned_head(PEERS, config), 1, rounds=9)
    assert len(Terms(head).voters) == 4
    head, newcomers = grow(owned_head(PEERS, config), 1, rounds=10)
    assert newcomers[0].peer_id in Terms(head).voters


def test_in_an_open_run_the_step_to_four_is_no_exception_to_slow_growth() -> None:
    config = quick_config(admission="open", admission_rounds=1)
    two, _ = grow(owned_head(PEERS[:2], config), 4, rounds=3)
    assert len(Terms(two).voters) == 2
    three, _ = grow(owned_head(PEERS[:3], config), 4)
    assert len(Terms(three).voters) == 4


def test_with_fewer_than_four_voters_left_the_founders_vote_alone() -> None:
    head, newcomers = grow(owned_head(PEERS[:1]), 3)
    for _ in range(2):
        head = follow(head, members(head, PEERS[0], *newcomers[:2]))
    assert Terms(head).voters == (PEERS[0].peer_id,)


def test_if_no_founder_is_left_all_who_qualify_vote() -> None:
    head, newcomers = grow(owned_head(PEERS[:1]), 3)
    for _ in range(2):
        head = follow(head, members(head, *newcomers))
    assert Terms(head).voters == tuple(sorted(peer.peer_id for peer in newcomers))


def test_a_claim_states_the_capacity_from_then_on() -> None:
    head = follow(FOUR, [item_of(claim_of(FOUR, PEERS[0], 5)), *members(FOUR, *PEERS[1:])])
    row = head.state.row(PEERS[0].peer_id)
    assert row is not None
    assert row.capacity == 5


# --- admission -------------------------------------------------------------------------------------------------------


def join_for(head: Head, peer: Identity, **changes: bytes) -> Join:
    empty = Join(head.run.run_id, 0, 2, 1, b"", b"", b"")
    return msgspec.structs.replace(empty, **changes)


def test_an_open_run_admits_everybody() -> None:
    head = owned_head(PEERS, quick_config(admission="open"))
    assert admitted(head.run, identity_of("x").peer_id, join_for(head, identity_of("x")), verify)


def test_an_invitation_is_for_one_peer_and_one_run() -> None:
    x, invite = identity_of("x"), identity_of("invite")
    good = invite.sign("invite", invite_payload(FOUR.run.run_id, x.peer_id))
    assert admitted(FOUR.run, x.peer_id, join_for(FOUR, x, invite_signature=good), verify)
    other_run = invite.sign("invite", bytes(32) + x.peer_id)
    self_made = x.sign("invite", invite_payload(FOUR.run.run_id, x.peer_id))
    for signature in (b"", other_run, self_made, invite.sign("allow", invite_payload(FOUR.run.run_id, x.peer_id))):
        assert not admitted(FOUR.run, x.peer_id, join_for(FOUR, x, invite_signature=signature), verify)
    assert not admitted(FOUR.run, identity_of("y").peer_id, join_for(FOUR, x, invite_signature=good), verify)


@pytest.mark.parametrize("sponsor", [PEERS[1], identity_of("invite")])
def test_an_allowlist_is_signed_by_founders_only(sponsor: Identity) -> None:
    head, x = owned_head(PEERS, quick_config(admission="allowlist")), identity_of("x")
    signature = sponsor.sign("allow", invite_payload(head.run.run_id, x.peer_id))
    join = join_for(head, x, sponsor=bytes(sponsor.peer_id), sponsor_signature=signature)
    assert admitted(head.run, x.peer_id, join, verify) == (sponsor in PEERS)


def test_a_founder_needs_no_invitation() -> None:
    assert admitted(FOUR.run, PEERS[0].peer_id, join_for(FOUR, PEERS[0]), verify)


def test_open_runs_ask_for_ten_updates_and_others_for_one() -> None:
    assert ProtocolConfig(admission="open").rounds_to_qualify == 10
    assert ProtocolConfig(admission="allowlist").rounds_to_qualify == 1
