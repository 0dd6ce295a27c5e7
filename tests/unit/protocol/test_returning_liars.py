"""Evidence against a peer that is no member: it keeps the peer from joining, and is good for nothing else."""

from __future__ import annotations

import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.codec import encode, sign, statement_hash
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Evidence, Ref, Signed
from spes_p2p.protocol.statements import Item, check_cut
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    alive_of,
    cut_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    transition_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
TERMS = Terms(HEAD)
LIAR = identity_of("liar")
JOIN = join_of(HEAD, LIAR)
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
VOTES = [encode(vote_of(TERMS, LIAR, Step.PREVOTE, digest("body", which))) for which in (1, 2)]
PROOF = Evidence(HEAD.run.run_id, 0, HEAD.round + 1, *VOTES)
ACCUSED = sign(PEERS[0], PROOF)
NO_JOIN = "no member and does not join"


def asked(voter: OneVoter, *statements: Signed) -> None:
    """The first of the others passes these on."""
    voter.hear(voter.others[0], *statements)


def proofs(voter: OneVoter) -> list[Evidence]:
    """Different proofs that this voter has published."""
    found = {m.signature: m for _, m in voter.sent if isinstance(m, Signed) and m.peer == voter.me.peer_id}
    return [signed.body for signed in found.values() if isinstance(signed.body, Evidence)]


def kinds(cut: Cut) -> list[ItemKind]:
    return [entry.kind for entry in cut.items if entry.peer in (LIAR.peer_id, ACCUSED.peer)]


def test_evidence_against_a_stranger_is_kept_once_its_join_is() -> None:
    voter = OneVoter(HEAD, PEERS, me=PEERS[1])
    with pytest.raises(RemoteProtocolError, match=NO_JOIN):
        asked(voter, ACCUSED)
    asked(voter, JOIN, ACCUSED)
    assert kinds(voter.round.cuts.make()) == [ItemKind.JOIN, ItemKind.EVIDENCE]


def test_a_join_beside_evidence_counts_for_nothing() -> None:
    both = [*ALIVE, item_of(JOIN), item_of(ACCUSED)]
    after = follow(HEAD, both)
    assert after.state.members == HEAD.state.members
    assert after.state.leases == follow(HEAD, ALIVE).state.leases
    assert transition_of(HEAD, both).newcomers == (LIAR.peer_id,)  # it has a place in the body, and no row
    assert LIAR.peer_id in follow(HEAD, [*ALIVE, item_of(JOIN)]).state.members


def test_a_cut_may_not_name_evidence_against_a_stranger_without_its_join() -> None:
    def check(*more: Item) -> None:
        cut, items = cut_of(HEAD, [*ALIVE, *more])
        check_cut(TERMS, cut, items, {})

    check(item_of(JOIN), item_of(ACCUSED))
    with pytest.raises(RemoteProtocolError, match=NO_JOIN):
        check(item_of(ACCUSED))


def test_who_remembers_a_proof_accuses_again_when_the_join_comes() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.updates._history.keep_proof(PROOF)
    voter.round.updates.accuse_again()
    assert proofs(voter) == []
    asked(voter, JOIN, JOIN)
    assert proofs(voter) == [PROOF]
    quiet = OneVoter(HEAD, PEERS)
    asked(quiet, JOIN)
    assert proofs(quiet) == []


def test_evidence_that_a_cut_names_is_taken_before_the_join_and_is_in_no_own_cut_without_it() -> None:
    voter = OneVoter(HEAD, PEERS, me=PEERS[1])
    voter.context.want(Ref(RefKind.STATEMENT, statement_hash(ACCUSED), NO_DIGEST), [PEERS[0].peer_id])
    asked(voter, ACCUSED)
    assert kinds(voter.round.cuts.make()) == []
    asked(voter, JOIN)
    assert kinds(voter.round.cuts.make()) == [ItemKind.JOIN, ItemKind.EVIDENCE]


def test_a_cut_must_name_the_evidence_if_it_names_the_join() -> None:
    voter = OneVoter(HEAD, PEERS, me=PEERS[1])
    asked(voter, JOIN, ACCUSED)
    assert voter.round.cuts.missing([], 0) == ["join"]
    assert voter.round.cuts.missing([item_of(JOIN)], 0) == ["evidence"]
    assert voter.round.cuts.missing([item_of(JOIN), item_of(ACCUSED)], 0) == []


def test_evidence_and_join_are_carried_together() -> None:
    before = OneVoter(HEAD, PEERS, me=PEERS[1])
    asked(before, JOIN, ACCUSED)
    held = list(before.round.updates.slots.values())
    after = OneVoter(follow(HEAD, ALIVE), PEERS, me=PEERS[1])
    with pytest.raises(RemoteProtocolError, match=NO_JOIN):
        after.round.carry(held[1])
    for statement in held:
        after.round.carry(statement)
    assert kinds(after.round.cuts.make()) == [ItemKind.JOIN, ItemKind.EVIDENCE]
