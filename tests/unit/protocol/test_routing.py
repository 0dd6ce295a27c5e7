"""Where a message belongs: rounds, ballots, heights, epochs."""

import pytest
from msgspec import structs

from spes_p2p.crypto import verify
from spes_p2p.protocol.body import Body, Cut
from spes_p2p.protocol.codec import cut_hash, sign
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.inbox import Parked
from spes_p2p.protocol.messages import (
    CutAnnouncement,
    CutMessage,
    Decided,
    HandoverDone,
    Message,
    Proposal,
    ProposalMessage,
    Receipt,
    Seen,
    TipAsk,
)
from spes_p2p.protocol.params import MAX_PARKED_PER_PEER
from spes_p2p.protocol.routing import Place, ballot_of, branch_of, epoch_of, place_of
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.protocol_cases import (
    alive_of,
    cut_of,
    identities,
    item_of,
    owned_head,
    quick_config,
    update_of,
    vote_of,
)

PEERS = identities(4)
IDS = tuple(peer.peer_id for peer in PEERS)
FIRST = owned_head(PEERS)


def body_on(head: Head, *side: int) -> Body:
    terms = Terms(head, tuple(IDS[place] for place in side))
    cut = cut_of(head, [item_of(alive_of(head, PEERS[0]))])
    return make_body(terms, advance(terms, cut_hash(cut[0]), cut[1], verify), (None,) * 4, b"")


TIP = next_head(FIRST, body_on(FIRST, 0, 1))
"""Round 2, tentative; the height is 2."""
OTHER = next_head(FIRST, body_on(FIRST, 2, 3))
FINAL, ATTEMPT = Terms(TIP), Terms(TIP, IDS[:2])


def vote(terms: Terms) -> Message:
    return vote_of(terms, PEERS[0], Step.PREVOTE, NO_DIGEST)


def in_ballot(terms: Terms) -> list[Message]:
    """One message of each kind that belongs to a ballot."""
    run, epoch = terms.head.run.run_id, terms.head.epoch
    cut = Cut(run, epoch, terms.round, ())
    named = CutAnnouncement(run, epoch, terms.ballot_round, 0, cut_hash(cut), terms.branch)
    body = body_on(terms.head)
    proposed = Proposal(run, epoch, terms.ballot_round, 0, NO_DIGEST, None, terms.branch)
    return [
        vote(terms),
        CutMessage(sign(PEERS[0], named), cut),
        ProposalMessage(sign(PEERS[0], proposed), body, b""),
        Seen(epoch, terms.ballot_round, (), (), terms.branch),
    ]


@pytest.mark.parametrize("place", range(4))
def test_what_belongs_to_a_ballot_names_its_number_and_branch(place: int) -> None:
    assert ballot_of(in_ballot(FINAL)[place]) == (2, b"")
    assert ballot_of(in_ballot(ATTEMPT)[place]) == (3, ATTEMPT.branch)
    assert epoch_of(in_ballot(FINAL)[place]) == 0
    assert place_of(in_ballot(FINAL)[place], FINAL) == (Place.NOW, 2)
    assert place_of(in_ballot(ATTEMPT)[place], ATTEMPT) == (Place.NOW, 3)
    assert place_of(in_ballot(ATTEMPT)[place], FINAL) == (Place.OTHER_BALLOT, 3)
    assert place_of(in_ballot(FINAL)[place], ATTEMPT) == (Place.OTHER_BALLOT, 2)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (vote(Terms(next_head(TIP, body_on(TIP)))), (Place.LATER, 4)),
        (vote(Terms(next_head(OTHER, body_on(OTHER, 2, 3)), IDS[2:])), (Place.LATER, 4)),
        (vote(Terms(FIRST, IDS[2:])), (Place.LATE, 2)),
        (structs.replace(vote(FINAL), body=structs.replace(vote(FINAL).body, round=3)), (Place.UNKNOWN_CHAIN, 3)),
        (structs.replace(vote(FINAL), body=structs.replace(vote(FINAL).body, round=1)), (Place.LATE, 1)),
        (alive_of(TIP, PEERS[0]), (Place.NOW, 3)),
        (alive_of(FIRST, PEERS[0]), (Place.LATE, 2)),
        (update_of(TIP, PEERS[0]), (Place.NOW, 3)),
        (update_of(OTHER, PEERS[2]), (Place.UNKNOWN_CHAIN, 3)),
        (update_of(owned_head(PEERS, quick_config(resend_ms=999)), PEERS[2]), (Place.LATE, 2)),
        (Receipt(3, NO_DIGEST, ()), (Place.NOW, 3)),
        (Decided(1, 3, NO_DIGEST), (Place.UNKNOWN_CHAIN, 3)),
        (TipAsk(0, 3), (Place.NOWHERE, -1)),
        (HandoverDone(3, NO_DIGEST), (Place.NOWHERE, -1)),
    ],
)
def test_where_a_message_belongs_on_a_tentative_tip(message: Message, expected: tuple[Place, int]) -> None:
    assert place_of(message, FINAL) == expected


def test_an_update_on_another_certificate_is_a_lie_where_there_were_no_branches() -> None:
    assert place_of(update_of(OTHER, PEERS[2]), Terms(FIRST)) == (Place.LATER, 3)
    chain = next_head(FIRST, body_on(FIRST))
    assert place_of(update_of(OTHER, PEERS[2]), Terms(chain)) == (Place.NOW, 3)  # and is refused there
    healed = next_head(TIP, body_on(TIP))
    assert place_of(update_of(OTHER, PEERS[2]), Terms(healed)) == (Place.UNKNOWN_CHAIN, 3)


def test_a_past_epoch_is_told_apart() -> None:
    later = structs.replace(alive_of(TIP, PEERS[0]), body=structs.replace(alive_of(TIP, PEERS[0]).body, epoch=1))
    assert place_of(later, FINAL) == (Place.UNKNOWN_CHAIN, 3)
    ahead = Terms(_in_epoch(TIP, 1))
    assert place_of(alive_of(TIP, PEERS[0]), ahead) == (Place.PAST_EPOCH, 3)


def _in_epoch(head: Head, epoch: int) -> Head:
    import dataclasses

    return dataclasses.replace(head, epoch=epoch)


def test_a_question_is_not_kept_for_another_ballot() -> None:
    assert [branch_of(message) for message in in_ballot(ATTEMPT)] == [ATTEMPT.branch] * 3 + [None]
    assert branch_of(alive_of(TIP, PEERS[0])) is None


def test_parked_messages_are_bounded_per_sender_and_end_with_their_round_or_height() -> None:
    parked = Parked()
    for number in range(MAX_PARKED_PER_PEER + 1):
        parked.keep(b"side", IDS[0], bytes([number % 256]))
    parked.keep(b"side", IDS[1], b"b")
    assert len(parked.take(b"side")) == MAX_PARKED_PER_PEER + 1
    assert parked.take(b"side") == []
    parked.keep(b"", IDS[0], b"final")
    parked.keep(b"side", IDS[0], b"attempt")
    parked.new_round(height=False)
    assert parked.take(b"side") == []
    assert parked.take(b"") == [(IDS[0], b"final")]
    parked.keep(b"", IDS[0], b"final")
    parked.new_round(height=True)
    assert parked.take(b"") == []
