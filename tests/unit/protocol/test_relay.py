from spes_p2p.ids import PeerId
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.messages import Evidence, Message, ProposalMessage, Seen, Signed, ViewChange, Vote
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import alive_of, identities, item_of, owned_head, vote_of

PEERS = identities(7)
HEAD = owned_head(PEERS)
PREVOTE = Step.PREVOTE
RESEND_MS = 1_000


def in_view_0() -> OneVoter:
    """A voter whose view 0 has begun, with a proposal of a body without updates."""
    voter = OneVoter(HEAD, PEERS)
    voter.round.voting.begin(0)
    voter.hear_all(*(alive_of(HEAD, peer, more=False) for peer in PEERS))
    body = voter.quiet_body([item_of(alive_of(HEAD, peer, more=False)) for peer in PEERS])
    voter.propose(body)
    voter.sent.clear()
    return voter


def seen_by(voter: OneVoter) -> list[PeerId]:
    return [to for to, message in voter.sent if isinstance(message, Seen)]


def answers(voter: OneVoter, asker: int, seen: Seen) -> list[Message]:
    voter.sent.clear()
    voter.hear(voter.others[asker], seen)
    return [message for to, message in voter.sent if to == voter.others[asker].peer_id]


def test_three_others_are_asked_per_resend_by_turns() -> None:
    voter = in_view_0()
    voter.wait(RESEND_MS - 100)
    assert seen_by(voter) == []
    voter.wait(2 * RESEND_MS)
    assert len(seen_by(voter)) == 6
    assert set(seen_by(voter)) == {peer.peer_id for peer in voter.others}


def test_a_voter_whose_view_has_not_begun_asks_once_there_are_votes() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.wait(RESEND_MS)
    assert seen_by(voter) == []
    voter.others_vote(PREVOTE, NO_DIGEST)
    voter.wait(RESEND_MS)
    assert len(seen_by(voter)) == 3


def test_who_has_seen_nothing_gets_the_proposal_and_the_votes_of_all_others() -> None:
    voter = in_view_0()
    voter.others_vote(PREVOTE, NO_DIGEST, held=(False, False))
    found = answers(voter, 0, Seen(0, 2, (), ()))
    votes = [message for message in found if isinstance(message, Signed) and isinstance(message.body, Vote)]
    assert voter.others[1].peer_id in {vote.peer for vote in votes}
    assert voter.others[0].peer_id not in {vote.peer for vote in votes}
    assert not any(isinstance(message, ProposalMessage) for message in found)  # the asker made it
    assert len([m for m in answers(voter, 2, Seen(0, 2, (), ())) if isinstance(m, ProposalMessage)]) == 1


def test_who_has_seen_everything_gets_nothing() -> None:
    voter = in_view_0()
    voter.others_vote(PREVOTE, NO_DIGEST)
    voter.others_ask_for_view(1, 2)
    assert answers(voter, 5, voter.round.relay.seen()) == []


def test_a_view_change_is_passed_on_if_it_is_later_than_the_one_seen() -> None:
    voter = in_view_0()
    voter.others_ask_for_view(2, 1)
    author = voter.others[0].peer_id
    place = voter.terms.voters.index(author)
    for known, num_passed in ((1, 1), (2, 0)):
        wishes = tuple(known if at == place else 0 for at in range(7))
        found = answers(voter, 3 + known, Seen(0, 2, wishes, voter.round.relay.seen().views))
        assert [m.body.view for m in found if isinstance(m, Signed) and isinstance(m.body, ViewChange)] == (
            [2] * num_passed
        )


def test_a_voter_that_asks_again_at_once_is_not_answered() -> None:
    voter = in_view_0()
    voter.others_vote(PREVOTE, NO_DIGEST)
    nothing = Seen(0, 2, (), ())
    assert answers(voter, 5, nothing) != []
    assert answers(voter, 5, nothing) == []
    voter.wait(RESEND_MS // 2)
    assert answers(voter, 5, nothing) != []


def test_an_equivocation_that_each_saw_one_half_of_comes_to_light() -> None:
    one, two = in_view_0(), in_view_0()
    liar = one.others[0]
    body = body_hash(one.round.bodies.known[next(iter(one.round.bodies.known))].body)
    one.hear(liar, vote_of(one.terms, liar, PREVOTE, body))
    two.hear(liar, vote_of(two.terms, liar, PREVOTE, NO_DIGEST))
    found = answers(one, 5, two.round.relay.seen())
    two.sent.clear()
    two.hear(two.others[5], *(m for m in found if isinstance(m, Signed)))
    proofs = [m for _, m in two.sent if isinstance(m, Signed) and isinstance(m.body, Evidence)]
    assert {encode(vote_of(one.terms, liar, PREVOTE, body))} <= {
        part for proof in proofs for part in (proof.body.first, proof.body.second)
    }


def test_only_voters_are_answered_and_marks_of_any_length_are_harmless() -> None:
    voter = in_view_0()
    voter.others_vote(PREVOTE, NO_DIGEST)
    seen = voter.round.relay.seen()
    short = Seen(0, 2, seen.wishes[:2], tuple(type(v)(v.view, b"", v.prevotes[:3], b"") for v in seen.views))
    assert answers(voter, 5, short) != []
    voter.sent.clear()
    voter.round.relay.answer(PeerId(bytes(32)), seen)
    voter._collect()
    assert voter.sent == []


def test_one_question_gets_a_bounded_number_of_answers_and_those_of_the_newest_views() -> None:
    voter = in_view_0()
    asker, *others = voter.others
    for view in range(1, 61):
        for peer in others:
            for step in Step:
                voter.round.voting.add_vote(vote_of(voter.terms, peer, step, NO_DIGEST, view=view))
    found = answers(voter, 0, Seen(0, 2, (), ()))
    views = [message.body.view for message in found if isinstance(message, Signed) and isinstance(message.body, Vote)]
    assert len(found) == len(views) == 512
    assert (views[0], min(views)) == (60, 60 - 512 // 10)
    assert asker.peer_id not in {message.peer for message in found if isinstance(message, Signed)}
