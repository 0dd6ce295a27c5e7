import pytest

from spes_p2p.crypto import verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.codec import encode, sign
from spes_p2p.protocol.evidence import accused, conflicting, named
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import CutAnnouncement, Evidence, Proposal, Signed
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.protocol_cases import (
    alive_of,
    claim_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    trained_items,
    update_of,
    vote_of,
)

PEERS = identities(5)
HEAD = owned_head(PEERS)
TERMS = Terms(HEAD)
RUN = HEAD.run.run_id
ONE, TWO = digest("one"), digest("two")


def cut_by(view: int, cut: bytes) -> Signed:
    return sign(PEERS[0], CutAnnouncement(RUN, 0, 2, view, digest("cut", cut)))


def test_two_values_for_one_slot_conflict() -> None:
    v = PEERS[0]
    assert conflicting(update_of(HEAD, v), update_of(HEAD, v, note="other"))
    assert conflicting(vote_of(TERMS, v, Step.PREVOTE, ONE), vote_of(TERMS, v, Step.PREVOTE, TWO))
    assert conflicting(vote_of(TERMS, v, Step.PREVOTE, ONE), vote_of(TERMS, v, Step.PREVOTE, ONE, held=True))
    assert conflicting(cut_by(0, b"a"), cut_by(0, b"b"))
    proposals = [sign(v, Proposal(RUN, 0, 2, 0, body, None)) for body in (ONE, TWO)]
    assert conflicting(*proposals)


def test_what_an_honest_peer_may_do_is_no_conflict() -> None:
    v = PEERS[0]
    assert not conflicting(alive_of(HEAD, v, True), alive_of(HEAD, v, False))
    assert not conflicting(claim_of(HEAD, v, 1), claim_of(HEAD, v, 2))
    assert not conflicting(update_of(HEAD, v), update_of(HEAD, v))
    assert not conflicting(vote_of(TERMS, v, Step.PREVOTE, ONE), vote_of(TERMS, v, Step.PRECOMMIT, TWO))
    assert not conflicting(vote_of(TERMS, v, Step.PREVOTE, ONE), vote_of(TERMS, v, Step.PREVOTE, TWO, view=1))
    assert not conflicting(cut_by(0, b"a"), cut_by(1, b"b"))
    assert not conflicting(update_of(HEAD, v), update_of(follow(HEAD, trained_items(HEAD, PEERS)), v))
    assert not conflicting(vote_of(TERMS, v, Step.PREVOTE, ONE), vote_of(TERMS, PEERS[1], Step.PREVOTE, TWO))


def proof(first: Signed, second: Signed, run: bytes = RUN) -> Evidence:
    return Evidence(run, 0, 2, encode(first), encode(second))


def test_evidence_names_the_equivocator() -> None:
    good = proof(update_of(HEAD, PEERS[3]), update_of(HEAD, PEERS[3], note="x"))
    assert accused(good, verify) == named(good) == PEERS[3].peer_id


def test_evidence_of_another_run_proves_nothing() -> None:
    good = proof(update_of(HEAD, PEERS[3]), update_of(HEAD, PEERS[3], note="x"), run=bytes(32))
    with pytest.raises(RemoteProtocolError, match="proves nothing"):
        accused(good, verify)


def test_garbage_is_no_evidence() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        accused(Evidence(RUN, 0, 2, b"", b""), verify)


def test_a_proven_equivocator_is_out_of_the_roster_and_its_shards_are_free() -> None:
    evil = PEERS[3]
    evidence = sign(PEERS[0], proof(update_of(HEAD, evil), update_of(HEAD, evil, note="x")))
    after = follow(HEAD, [*trained_items(HEAD, PEERS), item_of(evidence)])
    assert evil.peer_id not in after.state.members
    assert after.state.shards_of(evil.peer_id) == ()
    assert len(Terms(after).voters) == 4


def test_an_equivocator_does_not_come_back_in_the_cut_that_evicts_it() -> None:
    evil = PEERS[3]
    evidence = sign(PEERS[0], proof(update_of(HEAD, evil), update_of(HEAD, evil, note="x")))
    after = follow(HEAD, [*trained_items(HEAD, PEERS), item_of(evidence), item_of(join_of(HEAD, evil))])
    assert evil.peer_id not in after.state.members
