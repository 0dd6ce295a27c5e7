"""Every exclusive slot: two values of one peer become evidence once, and the evidence evicts."""

from collections.abc import Callable

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import body_hash, cut_hash, decode, encode, sign
from spes_p2p.protocol.evidence import accused
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import (
    CutAnnouncement,
    CutMessage,
    Evidence,
    Message,
    PartDigest,
    Proposal,
    ProposalMessage,
    Ref,
    Signed,
    ViewChange,
    Want,
)
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    claim_of,
    cut_of,
    follow,
    identities,
    item_of,
    owned_head,
    transition_of,
    update_of,
    vote_of,
)

PEERS = identities(4)
HEAD = owned_head(PEERS)
RUN = HEAD.run.run_id
UPDATES = digest("updates")
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
CUTS = [cut_of(HEAD, items)[0] for items in (ALIVE, ALIVE[:3])]
BODIES = [body_of(HEAD, transition_of(HEAD, items)) for items in (ALIVE, ALIVE[:3])]


def vote(voter: OneVoter, liar: Identity, which: int, step: Step) -> Message:
    return vote_of(voter.terms, liar, step, digest("body", which))


def wish(voter: OneVoter, liar: Identity, which: int) -> Message:
    qc = None if which == 0 else voter.qc_of(digest("body"), 0)
    return sign(liar, ViewChange(RUN, 0, 2, 1, qc))


def part(voter: OneVoter, liar: Identity, which: int) -> Message:
    return sign(liar, PartDigest(RUN, 0, 2, 1, UPDATES, digest("result", which)))


def cut(voter: OneVoter, liar: Identity, which: int) -> CutMessage:
    announcement = CutAnnouncement(RUN, 0, 2, 0, cut_hash(CUTS[which]))
    return CutMessage(sign(liar, announcement), CUTS[which])


def proposal(voter: OneVoter, liar: Identity, which: int) -> Message:
    body = BODIES[which]
    return ProposalMessage(sign(liar, Proposal(RUN, 0, 2, 0, body_hash(body), None)), body, b"")


def update(voter: OneVoter, liar: Identity, which: int) -> Message:
    return update_of(HEAD, liar, note=str(which))


KINDS: dict[str, Callable[[OneVoter, Identity, int], Message]] = {
    "prevote": lambda voter, liar, which: vote(voter, liar, which, Step.PREVOTE),
    "precommit": lambda voter, liar, which: vote(voter, liar, which, Step.PRECOMMIT),
    "view change": wish,
    "part digest": part,
    "cut": cut,
    "proposal": proposal,
    "update": update,
}


def proofs(voter: OneVoter) -> list[Signed]:
    found = {m.signature: m for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Evidence)}
    return list(found.values())


def settled() -> OneVoter:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in ALIVE))
    return voter


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_two_values_for_a_slot_are_evidence_once_and_evict(kind: str) -> None:
    voter, make = settled(), KINDS[kind]
    liar = voter.leaders[0]
    voter.hear(liar, make(voter, liar, 0), make(voter, liar, 0))
    assert proofs(voter) == []
    voter.hear(liar, make(voter, liar, 1), make(voter, liar, 1))
    (proof,) = proofs(voter)
    assert isinstance(proof.body, Evidence)
    assert accused(proof.body, verify) == liar.peer_id
    assert [to for to, message in voter.sent if message == proof] == [p for p in voter.terms.members if p != proof.peer]
    warnings = [effect.text for effect in voter.effects if isinstance(effect, fx.Notify)]
    assert sum("for one slot" in text for text in warnings) == 1
    assert liar.peer_id not in follow(HEAD, [*ALIVE, item_of(proof)]).state.members


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_second_value_with_a_wrong_signature_accuses_nobody(kind: str) -> None:
    voter, make = settled(), KINDS[kind]
    liar = voter.leaders[0]
    voter.hear(liar, make(voter, liar, 0))
    second = make(voter, liar, 1)
    if isinstance(second, CutMessage):
        forged: Message = CutMessage(msgspec.structs.replace(second.announcement, signature=bytes(64)), second.cut)
    elif isinstance(second, ProposalMessage):
        forged = msgspec.structs.replace(second, proposal=msgspec.structs.replace(second.proposal, signature=bytes(64)))
    else:
        forged = msgspec.structs.replace(second, signature=bytes(64))
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        voter.hear(liar, forged)
    assert proofs(voter) == []


def test_digests_over_other_updates_or_parts_and_later_views_are_other_slots() -> None:
    voter = settled()
    peer = voter.others[0]
    voter.hear(peer, part(voter, peer, 0), sign(peer, PartDigest(RUN, 0, 2, 2, UPDATES, digest("b"))))
    voter.hear(peer, sign(peer, PartDigest(RUN, 0, 2, 1, digest("other updates"), digest("c"))))
    voter.hear(peer, wish(voter, peer, 0), sign(peer, ViewChange(RUN, 0, 2, 2, voter.qc_of(digest("body"), 0))))
    assert proofs(voter) == []


def test_nobody_accuses_itself_or_a_peer_that_is_no_member() -> None:
    voter = settled()
    mine = [vote_of(voter.terms, voter.me, Step.PREVOTE, digest("body", which)) for which in (0, 1)]
    voter.round.updates.accuse(*mine)
    gone = identities(5)
    stranger = next(peer for peer in gone if peer.peer_id not in HEAD.state.members)
    voter.round.updates.accuse(*(update_of(HEAD, stranger, note=note, shards=()) for note in "ab"))
    voter.wait(1)
    assert proofs(voter) == []


def test_one_proof_per_accused_is_an_item_of_the_cut() -> None:
    voter = settled()
    liar = voter.leaders[0]
    voter.hear(liar, update(voter, liar, 0), update(voter, liar, 1))
    voter.hear(liar, part(voter, liar, 0), part(voter, liar, 1))
    evidence = [entry for entry in voter.round.cuts.make().items if entry.kind is ItemKind.EVIDENCE]
    assert len(evidence) == len(proofs(voter)) == 1


def test_a_proof_that_was_published_leaves_again_after_a_restart_as_the_same_bytes() -> None:
    voter = settled()
    liar = voter.leaders[0]
    voter.hear(liar, update(voter, liar, 0), update(voter, liar, 1))
    again = OneVoter(HEAD, PEERS, voter.journal)
    again.hear(liar, part(again, liar, 0), part(again, liar, 1))
    assert proofs(again) == proofs(voter)


def test_claims_and_signs_of_life_may_change() -> None:
    voter = settled()
    peer = voter.others[0]
    voter.hear(peer, claim_of(HEAD, peer, 1), claim_of(HEAD, peer, 2), alive_of(HEAD, peer, more=True))
    assert proofs(voter) == []


# --- what only the signatures of a quorum reveal ---------------------------------------------------------------------


def test_a_prevote_inside_a_quorum_certificate_convicts_with_another_that_is_held() -> None:
    voter = settled()
    liar, honest, third = voter.others
    body = digest("certified")
    voter.hear(liar, vote_of(voter.terms, liar, Step.PREVOTE, digest("shown here"), held=True))
    voter.hear(honest, vote_of(voter.terms, honest, Step.PREVOTE, body, held=True))
    voter.hear(third, sign(third, ViewChange(RUN, 0, 2, 1, voter.qc_of(body, 0))))
    (proof,) = proofs(voter)
    assert isinstance(proof.body, Evidence)
    assert accused(proof.body, verify) == liar.peer_id


def test_a_precommit_inside_a_certificate_convicts_in_the_next_round() -> None:
    machine = RoundMachine(HEAD, PEERS[0], verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
    machine.start(0)
    liar = PEERS[1]
    vote = vote_of(Terms(HEAD), liar, Step.PRECOMMIT, digest("shown here"))
    machine.handle(fx.Received(sender=liar.peer_id, data=encode(vote)), 1)
    certificate = certificate_of(HEAD, BODIES[0], PEERS[1:])
    effects = machine.handle(fx.Received(sender=PEERS[2].peer_id, data=encode(certificate)), 2)
    sent = [decode(effect.data) for effect in effects if isinstance(effect, fx.Send)]
    bodies = [message.body for message in sent if isinstance(message, Signed)]
    assert {accused(body, verify) for body in bodies if isinstance(body, Evidence)} == {liar.peer_id}
    assert {body.round for body in bodies if isinstance(body, Evidence)} == {2}
    named = [entry.kind for entry in machine._round.cuts.make().items if entry.kind is ItemKind.EVIDENCE]
    assert (machine.head.round, named) == (2, [ItemKind.EVIDENCE])


# --- a second cut that is needed all the same ------------------------------------------------------------------------


def test_who_asks_for_a_cut_gets_its_announcement_so_that_two_of_one_view_come_to_light() -> None:
    voter, other = settled(), settled()
    liar = voter.leaders[0]
    first, second = (cut(voter, liar, which) for which in (0, 1))
    voter.hear(liar, first)
    other.hear(liar, second)
    identity = cut_hash(CUTS[1])
    asker = voter.others[-1]
    other.hear(asker, Want(0, 2, (Ref(RefKind.CUT, identity, NO_DIGEST),)))
    assert other.sent[-1] == (asker.peer_id, second)
    voter.hear(asker, second)
    assert len(proofs(voter)) == 1
    assert identity not in voter.round.cuts.known  # nobody has asked for it yet
    voter.context.want(Ref(RefKind.CUT, identity, NO_DIGEST), [asker.peer_id])
    voter.hear(asker, second)
    assert identity in voter.round.cuts.known
    assert voter.round.cuts.announced[0] == first.announcement
    assert len(proofs(voter)) == 1


def test_a_cut_without_an_announcement_is_answered_bare() -> None:
    voter = settled()
    voter.round.cuts.learn(CUTS[1], ())
    asker = voter.others[-1]
    voter.hear(voter.leaders[0], cut(voter, voter.leaders[0], 0))
    voter.hear(asker, Want(0, 2, (Ref(RefKind.CUT, cut_hash(CUTS[1]), NO_DIGEST),)))
    assert voter.sent[-1] == (asker.peer_id, CUTS[1])
