"""Tentative certificates: what may follow what, which branch wins, what they change and what not."""

import pytest
from msgspec import structs

from spes_p2p.crypto import verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import branches
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.branches import Branches, abandoned, fork_order
from spes_p2p.protocol.certificate import certificate_terms, verify_certificate
from spes_p2p.protocol.codec import body_hash
from spes_p2p.protocol.evidence import conflicting, exclusive_slot
from spes_p2p.protocol.head import Head, Terms, may_go_on, next_head
from spes_p2p.protocol.messages import Vote
from spes_p2p.protocol.statements import Item, check_cut
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.protocol_cases import (
    alive_of,
    certificate_on,
    claim_of,
    cut_of,
    genesis_of,
    identities,
    item_of,
    join_of,
    owned_head,
    trained_items,
    update_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
IDS = tuple(peer.peer_id for peer in PEERS)
HEAD = owned_head(PEERS)
LEFT, RIGHT = PEERS[:2], PEERS[2:]


def body_on(head: Head, items: list[Item], side: list[int] | None = None) -> Body:
    """The body of a round, by the peers of a side or all."""
    terms = Terms(head, tuple(IDS[place] for place in side) if side else ())
    cut, chosen = cut_of(head, items)
    check_cut(terms, cut, chosen, {})
    return make_body(terms, advance(terms, body_hash_of(cut), chosen, verify), (None,) * 4, b"")


def body_hash_of(cut: object) -> bytes:
    from spes_p2p.protocol.body import Cut
    from spes_p2p.protocol.codec import cut_hash

    assert isinstance(cut, Cut)
    return cut_hash(cut)


def quiet(head: Head, side: list[int] | None = None, present: list[int] | None = None) -> Head:
    """The head after a round in which some were alive and nothing else happened."""
    there = present if present is not None else side or range(len(IDS))
    return next_head(head, body_on(head, [item_of(alive_of(head, PEERS[place])) for place in there], side))


# --- the chain -------------------------------------------------------------------------------------------------------


def test_a_tentative_body_builds_on_its_tip_and_a_final_one_names_both() -> None:
    first = body_on(HEAD, [], [0, 1])
    tip = next_head(HEAD, first)
    assert (first.final, first.prev, first.via, first.side) == (False, HEAD.hash, NO_DIGEST, b"\x03")
    second = body_on(tip, [], [0, 1])
    assert (second.round, second.prev, second.via) == (3, tip.hash, NO_DIGEST)
    final = body_on(next_head(tip, second), [])
    assert (final.final, final.round, final.prev, final.via) == (True, 4, HEAD.hash, body_hash(second))
    assert body_on(HEAD, []).via == NO_DIGEST


def test_a_head_knows_its_branch_and_its_height() -> None:
    one = quiet(HEAD, [0, 1])
    two = quiet(one, [0, 1])
    assert [head.hash for head in two.branch] == [one.hash, two.hash]
    assert (two.height, two.num_tentative, two.last_final) == (2, 2, HEAD)
    final = quiet(two)
    assert (final.is_final, final.branch, final.height, final.num_tentative) == (True, (), 5, 0)
    assert final.recent == ((2, one.hash), (3, two.hash), (4, final.hash))


def test_a_final_body_on_another_tip_does_not_extend_this_one() -> None:
    one, other = quiet(HEAD, [0, 1]), quiet(HEAD, [2, 3])
    with pytest.raises(RemoteProtocolError, match="does not extend"):
        next_head(other, body_on(one, []))


def test_an_entry_that_names_nobody_is_refused() -> None:
    body = body_on(HEAD, [item_of(alive_of(HEAD, PEERS[0]))], [0, 1])
    entries = tuple(structs.replace(entry, who=9) for entry in body.entries)
    with pytest.raises(RemoteProtocolError, match="names nobody"):
        next_head(HEAD, structs.replace(body, entries=entries))


def test_seed_roles_and_ballot_of_a_round_on_a_tentative_tip() -> None:
    tip = quiet(HEAD, [0, 1])
    final, attempt = Terms(tip), Terms(tip, IDS[:2])
    assert (final.round, final.ballot_round, final.branch) == (3, 2, b"")
    assert final.leaders == Terms(HEAD).leaders  # one final voting for the whole height
    assert final.seed == attempt.seed != Terms(HEAD).seed
    assert (attempt.ballot_round, len(attempt.branch)) == (3, 32)
    assert attempt.branch != Terms(tip, IDS[2:]).branch != Terms(HEAD, IDS[2:]).branch
    assert set(attempt.leaders) == set(attempt.eligible) == set(IDS[:2])


# --- sides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_voters", "side", "allowed", "quorum"),
    [
        (2, 1, True, 1),
        (3, 1, True, 1),
        (3, 2, True, 2),
        (3, 3, False, 3),
        (4, 1, False, 2),
        (4, 2, True, 2),
        (4, 3, False, 3),
        (7, 2, False, 3),
        (7, 3, True, 3),
        (7, 4, True, 3),
        (7, 5, False, 4),
        (10, 4, True, 4),
    ],
)
def test_a_side_has_more_than_f_voters_and_less_than_a_quorum(
    num_voters: int, side: int, allowed: bool, quorum: int
) -> None:
    head = owned_head(identities(num_voters))
    chosen = head.state.voters[:side]
    assert may_go_on(head, chosen) is allowed
    assert Terms(head, chosen).quorum == quorum


def test_only_so_many_tentative_certificates_follow_a_final_one_unless_voters_are_few() -> None:
    tip = HEAD
    for _ in range(3):
        assert may_go_on(tip, IDS[:2])
        tip = quiet(tip, [0, 1])
    assert not may_go_on(tip, IDS[:2])
    few = owned_head(PEERS[:2])
    for _ in range(5):
        few = quiet(few, [0], [0])
    assert may_go_on(few, few.state.voters[:1])


def test_acks_and_replicas_of_an_attempt_follow_from_all_voters() -> None:
    terms = Terms(HEAD, IDS[:2])
    assert (terms.num_faults, terms.replicas, terms.expert_acks, terms.psi_acks) == (1, 2, 1, 1)
    alone = owned_head(PEERS[:2])
    terms = Terms(alone, alone.state.voters[:1])
    assert (terms.eligible, terms.replicas, terms.expert_acks, terms.psi_acks) == (terms.side, 1, 0, 0)


def test_members_without_a_vote_help_an_attempt_if_they_were_in_the_last_cut() -> None:
    two = PEERS[:2]
    head = owned_head(two)
    newcomer = identity_of("newcomer")
    items = [item_of(alive_of(head, peer)) for peer in two] + [item_of(join_of(head, newcomer))]
    joined = next_head(head, body_on(head, items))
    assert newcomer.peer_id not in joined.state.voters
    side = joined.state.voters[:1]
    assert set(Terms(joined, side).eligible) == {*side, newcomer.peer_id}
    later = quiet(joined, None, [0, 1])
    assert Terms(later, side).eligible == side


def test_a_tentative_certificate_needs_its_own_quorum_and_is_never_taken_for_a_final_one() -> None:
    body = body_on(HEAD, [item_of(alive_of(HEAD, PEERS[0]))], [0, 1])
    terms = certificate_terms(HEAD, body)
    good = certificate_on(terms, body, LEFT)
    head = verify_certificate(terms, good, verify)
    assert (head.side, head.is_final) == (IDS[:2], False)
    with pytest.raises(RemoteProtocolError, match="2 make a quorum"):
        verify_certificate(terms, certificate_on(terms, body, LEFT[:1]), verify)
    with pytest.raises(RemoteProtocolError, match="another side"):
        verify_certificate(Terms(HEAD), good, verify)
    votes_of_all = certificate_on(Terms(HEAD), body, PEERS)
    with pytest.raises(RemoteProtocolError):
        verify_certificate(terms, votes_of_all, verify)


def test_a_certificate_of_a_side_that_is_too_small_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="may not make one"):
        certificate_terms(HEAD, body_on(HEAD, [], [3]))


def test_a_final_certificate_on_a_tentative_tip_has_the_votes_of_its_height() -> None:
    tip = quiet(HEAD, [0, 1])
    body = body_on(tip, [])
    terms = certificate_terms(tip, body)
    certificate = certificate_on(terms, body, PEERS[:3])
    assert verify_certificate(terms, certificate, verify).is_final
    vote = vote_of(terms, PEERS[0], Step.PRECOMMIT, body_hash(body)).body
    assert isinstance(vote, Vote)
    assert (vote.round, vote.branch) == (2, b"")


# --- slots -----------------------------------------------------------------------------------------------------------


def test_votes_of_two_tips_are_for_one_slot_and_those_of_an_attempt_are_not() -> None:
    tip = quiet(HEAD, [0, 1])
    on_final = vote_of(Terms(HEAD), PEERS[0], Step.PREVOTE, HEAD.hash)
    on_tip = vote_of(Terms(tip), PEERS[0], Step.PREVOTE, tip.hash)
    assert exclusive_slot(on_final) == exclusive_slot(on_tip) == ("vote", 0, 2, 0, Step.PREVOTE, b"")
    assert conflicting(on_final, on_tip)
    attempt = Terms(HEAD, IDS[:2])
    aside = vote_of(attempt, PEERS[0], Step.PREVOTE, tip.hash)
    assert exclusive_slot(aside) == ("vote", 0, 2, 0, Step.PREVOTE, attempt.branch)
    assert not conflicting(on_final, aside)


def test_an_honest_peer_may_train_a_round_again_on_another_branch() -> None:
    one, other = quiet(HEAD, [0, 1]), quiet(HEAD, [0, 1], [0])
    first, second = update_of(one, PEERS[0]), update_of(other, PEERS[0])
    assert exclusive_slot(first) == ("manifest", 0, 3, 0, 0, one.hash)
    assert not conflicting(first, second)
    assert conflicting(first, update_of(one, PEERS[0], note="again"))


# --- fork choice -----------------------------------------------------------------------------------------------------


def known(*heads: Head) -> Branches:
    found = Branches.of(HEAD)
    for head in heads:
        found.add(head, certificate_on(Terms(HEAD), body_on(HEAD, []), []))
    return found


def test_more_distinct_voters_win_then_more_tokens_then_the_lower_hash() -> None:
    seven = identities(7)
    head = owned_head(seven)
    voters = head.state.voters

    def by(side: tuple[int, ...], items: list[Item] | None = None) -> Head:
        terms = Terms(head, tuple(voters[place] for place in side))
        cut, chosen = cut_of(head, items or [])
        return next_head(head, make_body(terms, advance(terms, body_hash_of(cut), chosen, verify), (None,) * 4, b""))

    wide, narrow, rich = by((0, 1, 2, 3)), by((4, 5, 6)), by((4, 5, 6), trained_items(head, seven[:3]))
    found = Branches.of(head)
    for tip in (narrow, rich, wide):
        found.add(tip, certificate_on(Terms(head), body_on(HEAD, []), []))
    assert found.best() == wide
    assert [fork_order(tip)[:2] for tip in (wide, narrow, rich)] == [(-4, 0), (-3, 0), (-3, -3000)]
    assert min((narrow, rich), key=fork_order) == rich
    equal = by((4, 5, 6)), by((3, 4, 5))
    assert min(equal, key=fork_order) == min(equal, key=lambda tip: tip.hash)


def test_the_tip_is_the_end_of_a_branch_and_the_order_of_arrival_changes_nothing() -> None:
    one = quiet(HEAD, [0, 1])
    two = quiet(one, [0, 1])
    other = quiet(HEAD, [2, 3])
    best = {known(*order).best().hash for order in ((one, two, other), (other, one, two), (two, other, one))}
    assert len(best) == 1
    assert best <= {two.hash, other.hash}
    assert known(one).best() == one
    assert known(one, two).best() == two
    assert known().best() == HEAD


def test_others_branches_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_KNOWN", 0)
    one, other = quiet(HEAD, [0, 1]), quiet(HEAD, [2, 3])
    found = known(one)
    assert found.add(other, certificate_on(Terms(HEAD), body_on(HEAD, []), [])) is False
    assert found.get(other.hash) is None
    assert found.add(one, certificate_on(Terms(HEAD), body_on(HEAD, []), [])) is False  # known already


def test_what_is_abandoned_is_what_is_not_behind_the_new_tip() -> None:
    one = quiet(HEAD, [0, 1])
    two, fork = quiet(one, [0, 1]), quiet(one, [2, 3])
    assert abandoned(two, fork) == (two.hash,)
    assert abandoned(two, HEAD) == (one.hash, two.hash)
    assert abandoned(one, two) == ()


# --- what they change ------------------------------------------------------------------------------------------------


def test_a_tentative_cut_has_nothing_that_changes_the_roster() -> None:
    join = item_of(join_of(HEAD, identity_of("newcomer")))
    with pytest.raises(RemoteProtocolError, match="would change the roster"):
        body_on(HEAD, [join], [0, 1])
    assert body_on(HEAD, [join]).newcomers == (identity_of("newcomer").peer_id,)


def test_silence_counts_final_cuts_only() -> None:
    tip = HEAD
    for _ in range(3):
        tip = quiet(tip, [0, 1])
    assert tip.state.members == HEAD.state.members
    assert tip.present == {IDS[0], IDS[1]}
    once = quiet(tip, None, [0, 1, 2])
    assert IDS[3] in once.state.members
    twice = quiet(once, None, [0, 1, 2])
    assert twice.state.members == IDS[:3]


def test_leases_move_on_a_branch_and_go_back_at_the_next_final_certificate() -> None:
    founders = PEERS[:3]
    head = owned_head(founders, capacity=4)
    mine = head.state.shards_of(IDS[2])
    assert mine != ()

    def alive(tip: Head) -> list[Item]:
        return [item_of(alive_of(tip, peer)) for peer in founders[:2]]

    tip = next_head(head, body_on(head, alive(head), [0, 1]))
    assert tip.state.shards_of(IDS[2]) == mine  # one round without an update
    tip = next_head(tip, body_on(tip, alive(tip), [0, 1]))
    assert tip.state.shards_of(IDS[2]) == ()
    back = next_head(tip, body_on(tip, [*alive(tip), item_of(alive_of(tip, founders[2]))]))
    assert back.state.shards_of(IDS[2]) == mine
    gone = next_head(back, body_on(back, alive(back)))
    begun = {owner.begun for shard in mine for owner in gone.state.leases[shard].owners}
    assert begun == {gone.round}  # the second final round without an update: leased anew


def test_an_owner_that_delivered_on_the_branch_keeps_the_later_round_in_its_lease() -> None:
    tip = next_head(HEAD, body_on_with_receipts(HEAD, [0, 1]))
    mine = tip.state.shards_of(IDS[0])
    final = quiet(tip)
    lasts = {owner.last for shard in mine for owner in final.state.leases[shard].owners if owner.who == IDS[0]}
    assert (mine, lasts) == (HEAD.state.shards_of(IDS[0]), {2})
    row = final.state.row(IDS[0])
    assert row is not None
    assert (row.accepted, row.base_round, row.last_item_round) == (1, 2, 3)


def body_on_with_receipts(head: Head, side: list[int]) -> Body:
    terms = Terms(head, tuple(IDS[place] for place in side))
    cut, chosen = cut_of(head, trained_items(head, [PEERS[place] for place in side]))
    return make_body(terms, advance(terms, body_hash_of(cut), chosen, verify), (None,) * 4, b"")


def test_genesis_is_final_and_everybody_was_there() -> None:
    genesis = genesis_of(PEERS)
    assert (genesis.is_final, genesis.present, genesis.height) == (True, set(IDS), 1)
    claims = body_on(genesis, [item_of(claim_of(genesis, peer)) for peer in LEFT], [0, 1])
    tip = next_head(genesis, claims)
    assert len(tip.state.shards_of(IDS[0])) == 2
    assert RIGHT[0].peer_id in tip.state.voters
