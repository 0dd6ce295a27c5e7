"""With whom a voter goes on while others are silent, when it waits, and when all are back."""

import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import bits, sign
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Side, TipAsk, ViewChange
from spes_p2p.testing.one_machine import OneMachine, side_of, tentative
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
)
from spes_p2p.testing.swarm import identity_of

PATIENCE_MS = 10_000
CONFIG = quick_config(patience_ms=PATIENCE_MS)
PEERS = identities(4)
HEAD = owned_head(PEERS, CONFIG)
ME, FRIEND, THIRD, FOURTH = PEERS
TWO = tuple(sorted((ME.peer_id, FRIEND.peer_id)))
WAIT_MS = 5_000 + PATIENCE_MS + 3_000
"""View 0 begins after the grace, the others are silent after the patience, and a side is stable for two resends."""


def with_friend(me: OneMachine | None = None) -> OneMachine:
    """A voter in an attempt with the one other that it hears."""
    found = me or OneMachine(HEAD, ME)
    found.pass_time(WAIT_MS, [FRIEND], [ME, FRIEND])
    assert found.machine.terms.side == TWO
    return found


def joined(num_founders: int = 2) -> tuple[Head, Identity]:
    """A run of few founders with a member that does not vote, and that member."""
    founders = PEERS[:num_founders]
    head = owned_head(founders, CONFIG)
    newcomer = identity_of("newcomer")
    items = [item_of(alive_of(head, peer)) for peer in founders] + [item_of(join_of(head, newcomer))]
    return follow(head, items), newcomer


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_voter_goes_on_with_those_it_hears_once_the_others_were_silent_for_the_patience() -> None:
    voter = OneMachine(HEAD, ME)
    voter.pass_time(5_000 + PATIENCE_MS, [FRIEND], [ME, FRIEND])
    assert voter.machine.terms.side == ()
    assert voter.notes() == []
    voter.pass_time(3_000, [FRIEND], [ME, FRIEND])
    assert voter.machine.terms.side == TWO
    assert voter.notes() == ["2 of 4 voters heard: going on with tentative certificates until the rest is"]
    assert voter.machine.progress(voter.now_ms).tentative
    voters = HEAD.state.voters
    _, last = voter.sides_sent()[-1]
    assert {voters[place] for place in bits(last.heard, 4)} == set(TWO)
    assert {voters[place] for place in bits(last.side, 4)} == set(TWO)


def test_a_voter_on_another_tip_is_not_on_the_side() -> None:
    voter = OneMachine(HEAD, ME)
    _, tip = tentative(HEAD, [FRIEND, THIRD])
    for _ in range(2 * WAIT_MS // 500):
        voter.pass_time(500)
        voter.hear(FRIEND, side_of(HEAD, FRIEND, [ME, FRIEND], tip=tip))
    assert voter.machine.terms.side == ()
    assert voter.machine.progress(voter.now_ms).waiting == ("1 of 4 voters heard, 3 needed")
    assert any(isinstance(message, TipAsk) and to == FRIEND.peer_id for to, message in voter.sent())


def test_one_alone_of_four_waits_and_says_so_once_until_it_hears_a_quorum() -> None:
    voter = OneMachine(HEAD, ME)
    voter.pass_time(2 * WAIT_MS)
    text = "1 of 4 voters heard, 3 needed"
    assert voter.machine.progress(voter.now_ms).waiting == text
    assert voter.notes() == [f"waiting: {text}"]
    assert voter.machine.terms.side == ()
    for peer in (FRIEND, THIRD):
        voter.hear(peer, side_of(HEAD, peer, [ME, FRIEND, THIRD]))
    assert voter.machine.progress(voter.now_ms).waiting == ""


@pytest.mark.parametrize("num_founders", [2, 3])
def test_one_alone_of_two_or_three_goes_on(num_founders: int) -> None:
    voter = OneMachine(owned_head(PEERS[:num_founders], CONFIG), ME)
    voter.pass_time(2 * WAIT_MS)
    assert voter.machine.head.branch[0].side == (ME.peer_id,)
    assert len(voter.machine.head.branch) >= 1
    assert voter.machine.head.last_final.round == 1


def test_a_quorum_that_is_reached_over_others_goes_on_with_the_final_ballot() -> None:
    voter = OneMachine(HEAD, ME)
    voter.hear(THIRD, side_of(HEAD, THIRD, [FRIEND, THIRD]))
    voter.pass_time(2 * WAIT_MS, [FRIEND], [ME, FRIEND, THIRD])
    assert (voter.machine.terms.side, voter.notes()) == ((), [])
    assert voter.machine.progress(voter.now_ms).waiting == ""


# --- all again -------------------------------------------------------------------------------------------------------


def test_when_a_quorum_is_heard_again_the_final_ballot_opens_and_all_are_asked_for_their_tips() -> None:
    voter = with_friend()
    before = len(voter.effects)
    voter.hear(THIRD, side_of(HEAD, THIRD, [THIRD]))
    assert voter.machine.terms.side == TWO  # it does not hear this voter
    voter.hear(THIRD, side_of(HEAD, THIRD, [ME, THIRD]))
    assert voter.machine.terms.side == ()
    asked = {to for to, message in voter.sent(voter.effects[before:]) if isinstance(message, TipAsk)}
    assert asked == {FRIEND.peer_id, THIRD.peer_id, FOURTH.peer_id}


def test_nobody_waits_again_for_those_that_are_silent_still() -> None:
    voter = with_friend()
    certificate, head = tentative(HEAD, [ME, FRIEND])
    voter.hear(FRIEND, certificate)
    assert (voter.machine.head.hash, voter.machine.terms.side) == (head.hash, TWO)


def test_after_the_last_tentative_certificate_that_may_be_the_side_waits() -> None:
    voter, head = with_friend(), HEAD
    for _ in range(3):
        certificate, head = tentative(head, [ME, FRIEND])
        voter.hear(FRIEND, certificate)
    assert (voter.machine.head.hash, voter.machine.terms.side) == (head.hash, ())
    voter.settle()
    voter.pass_time(WAIT_MS, [FRIEND], [ME, FRIEND])
    assert voter.machine.terms.side == ()
    assert voter.machine.progress(voter.now_ms).waiting == ("2 of 4 voters heard, 3 needed")


# --- what is kept for another ballot ---------------------------------------------------------------------------------


def test_a_vote_of_another_ballot_waits_until_that_opens() -> None:
    voter = OneMachine(HEAD, ME)
    attempt = Terms(HEAD, TWO)
    wish = ViewChange(HEAD.run.run_id, 0, attempt.ballot_round, 1, None, attempt.branch)
    voter.hear(FRIEND, sign(FRIEND, wish))
    assert voter.machine._round.voting.wishes == {}
    with_friend(voter)
    assert set(voter.machine._round.voting.wishes) == {FRIEND.peer_id}


def test_a_wrong_message_that_was_kept_is_dropped_and_told() -> None:
    voter = OneMachine(HEAD, ME)
    attempt = Terms(HEAD, TWO)
    wish = ViewChange(HEAD.run.run_id, 0, attempt.ballot_round, 1, None, attempt.branch)
    voter.hear(FRIEND, sign(THIRD, wish))  # one that has no vote there
    with_friend(voter)
    assert "dropped a message kept for this round: a view change of a peer that does not vote" in voter.notes()


# --- questions and answers -------------------------------------------------------------------------------------------


def test_a_voter_that_asks_is_answered_and_not_at_every_question() -> None:
    voter = OneMachine(HEAD, ME)
    question = side_of(HEAD, FRIEND, PEERS, asks=True)
    answers = []
    for voter.now_ms in (1_000, 1_499, 1_500):
        answers.append(voter.sides_sent(voter.hear(FRIEND, question)))
    assert [[to for to, _ in sent] for sent in answers] == [[FRIEND.peer_id], [], [FRIEND.peer_id]]
    assert not answers[0][0][1].asks


def test_what_a_stranger_says_of_sides_counts_for_nothing() -> None:
    voter = OneMachine(HEAD, ME)
    stranger = identity_of("stranger")
    spoken = side_of(HEAD, FRIEND, [FRIEND], asks=True).body
    assert voter.sides_sent(voter.hear(stranger, sign(stranger, spoken))) == []


def test_a_side_of_another_run_or_in_another_name_is_refused() -> None:
    voter = OneMachine(HEAD, ME)
    signed = side_of(HEAD, FRIEND, PEERS)
    assert isinstance(signed.body, Side)
    with pytest.raises(RemoteProtocolError, match="another run or peer"):
        voter.hear(THIRD, signed)
    with pytest.raises(RemoteProtocolError, match="another run or peer"):
        voter.hear(FRIEND, sign(FRIEND, msgspec.structs.replace(signed.body, run=bytes(32))))
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        voter.hear(FRIEND, msgspec.structs.replace(signed, signature=bytes(64)))


def test_a_side_of_another_height_says_nothing_of_this_one() -> None:
    voter = OneMachine(HEAD, ME)
    signed = side_of(HEAD, FRIEND, [FRIEND])
    assert isinstance(signed.body, Side)
    voter.hear(FRIEND, sign(FRIEND, msgspec.structs.replace(signed.body, height=1)))
    assert voter.machine._siding.ears.declared == {}
    voter.hear(FRIEND, signed)
    assert voter.machine._siding.ears.declared == {FRIEND.peer_id: (frozenset({FRIEND.peer_id}), HEAD.hash)}


# --- members without a vote ------------------------------------------------------------------------------------------


def test_a_member_without_a_vote_takes_part_in_the_attempt_of_a_voter_on_its_tip() -> None:
    head, newcomer = joined()
    voters = list(PEERS[:2])
    helper = OneMachine(head, newcomer)
    one, other = voters
    helper.hear(one, side_of(head, one, [one], side=[one]))
    assert helper.machine.terms.side == (one.peer_id,)
    helper.hear(other, side_of(head, other, [other], side=[other]))
    assert helper.machine.terms.side == (one.peer_id,)  # of the first
    helper.hear(one, side_of(head, one, voters))
    assert helper.machine.terms.side == ()


def test_a_member_without_a_vote_follows_nobody_on_another_tip_and_no_false_side() -> None:
    head, newcomer = joined()
    one, other = PEERS[:2]
    helper = OneMachine(head, newcomer)
    _, tip = tentative(head, [one])
    helper.hear(one, side_of(head, one, [one], side=[one], tip=tip))
    assert helper.machine.terms.side == ()
    for named in ([one, other], [other]):
        with pytest.raises(RemoteProtocolError, match="may make no certificate"):
            helper.hear(one, side_of(head, one, [one], side=named))


def test_an_attempt_is_announced_to_those_who_acknowledge_in_it_and_do_not_vote() -> None:
    head, newcomer = joined()
    voter = OneMachine(head, ME)
    voter.hear(newcomer, alive_of(head, newcomer))
    voter.pass_time(WAIT_MS)
    told = [side for to, side in voter.sides_sent() if to == newcomer.peer_id]
    assert {len(bits(side.side, 2)) for side in told} == {1}


def test_whom_a_final_certificate_removes_is_not_asked_any_more() -> None:
    voter = OneMachine(HEAD, ME)
    certificate = certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, [])), PEERS)
    voter.pass_time(2 * WAIT_MS)
    assert voter.machine.progress(voter.now_ms).waiting != ""
    effects = voter.hear(FRIEND, certificate)
    assert any(isinstance(effect, fx.Adopt) for effect in effects)
    assert voter.machine.progress(voter.now_ms).waiting == ""
