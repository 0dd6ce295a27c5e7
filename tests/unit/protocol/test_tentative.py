"""One machine among tentative certificates: which branch it builds on, what it gives up, and how branches heal."""

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.branches import fork_order
from spes_p2p.protocol.codec import body_hash, cut_hash, sign
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.height import Height
from spes_p2p.protocol.messages import (
    Alive,
    CutAnnouncement,
    CutMessage,
    Decided,
    Proposal,
    ProposalMessage,
    Signed,
    TipAsk,
)
from spes_p2p.protocol.params import CERTIFICATES_PER_ANSWER, MAX_PEERS_REMEMBERED
from spes_p2p.protocol.wire import ItemKind, Step
from spes_p2p.testing.one_machine import OneMachine, quiet_body, side_of, tentative
from spes_p2p.testing.protocol_cases import (
    alive_of,
    certificate_of,
    cut_of,
    identities,
    item_of,
    owned_head,
    quick_config,
    receipt_of,
    update_of,
    vote_of,
)

CONFIG = quick_config(patience_ms=10_000)
PEERS = identities(4)
HEAD = owned_head(PEERS, CONFIG)
ME, FRIEND, THIRD, FOURTH = PEERS
LEFT, RIGHT = [ME, FRIEND], [THIRD, FOURTH]
TWO = tuple(sorted(peer.peer_id for peer in LEFT))
WAIT_MS = 18_000


def two_branches(head: Head = HEAD) -> tuple[tuple[Certificate, Head], tuple[Certificate, Head]]:
    """Two tentative certificates on one head: the one that the fork choice prefers first."""
    made = tentative(head, LEFT), tentative(head, RIGHT)
    better, worse = sorted(made, key=lambda pair: fork_order(pair[1]))
    return better, worse


def final(tip: Head) -> tuple[Certificate, Head]:
    """A final certificate on a tip, and the head after it."""
    body = quiet_body(tip, items=[item_of(alive_of(tip, peer)) for peer in PEERS])
    return certificate_of(tip, body, PEERS), next_head(tip, body)


def adopted(effects: list[fx.Effect]) -> list[fx.Adopt]:
    return [effect for effect in effects if isinstance(effect, fx.Adopt)]


def asked(machine: OneMachine, effects: list[fx.Effect]) -> list[tuple[bytes, TipAsk]]:
    return [(to, message) for to, message in machine.sent(effects) if isinstance(message, TipAsk)]


# --- fork choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("better_first", [True, False])
def test_the_order_of_arrival_does_not_change_the_tip(better_first: bool) -> None:
    (better, best), (worse, other) = two_branches()
    peer = OneMachine(HEAD, ME)
    first, second = (better, worse) if better_first else (worse, better)
    peer.hear(FRIEND, first)
    effects = peer.hear(THIRD, second)
    assert peer.machine.head.hash == best.hash
    assert peer.machine.head.last_final.hash == HEAD.hash
    assert [adopt.abandoned for adopt in adopted(effects)] == ([] if better_first else [(other.hash,)])


def test_a_longer_branch_is_taken_over_certificate_by_certificate() -> None:
    (_, best), _ = two_branches()
    side = LEFT if best.side == TWO else RIGHT
    mine, theirs = tentative(HEAD, side), tentative(HEAD, RIGHT if side == LEFT else LEFT)
    mixed = [ME, THIRD]
    second = tentative(theirs[1], mixed)  # three distinct voters
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, mine[0])
    peer.hear(THIRD, theirs[0])
    assert peer.machine.head.hash == mine[1].hash
    effects = peer.hear(THIRD, second[0])
    assert [adopt.head.hash for adopt in adopted(effects)] == [theirs[1].hash, second[1].hash]
    assert [adopt.abandoned for adopt in adopted(effects)] == [(mine[1].hash,), ()]
    assert peer.machine.head.hash == second[1].hash


def test_who_shows_a_branch_that_is_not_the_tip_is_asked_for_the_rest_of_it() -> None:
    (better, _), (worse, other) = two_branches()
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, better)
    peer.settle()
    effects = peer.hear(THIRD, worse)
    assert asked(peer, effects) == [(THIRD.peer_id, TipAsk(0, 3, 1, other.hash))]
    assert adopted(peer.hear(THIRD, worse)) == []


def test_a_certificate_on_a_branch_that_is_not_known_makes_the_peer_ask_from_the_last_final_one() -> None:
    (better, _), (_, other) = two_branches()
    side = LEFT if other.side == TWO else RIGHT
    second, _ = tentative(other, side)
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, better)
    peer.hear(FRIEND, tentative(peer.machine.head, LEFT)[0])
    effects = peer.hear(THIRD, second)
    assert asked(peer, effects) == [(THIRD.peer_id, TipAsk(0, 2, 1, HEAD.hash))]


def test_a_peer_that_shows_its_branch_again_is_asked_for_what_comes_after() -> None:
    (better, _), (worse, other) = two_branches()
    side = LEFT if other.side == TWO else RIGHT
    second, tip = tentative(other, side)
    peer = OneMachine(HEAD, ME)
    for sender, message in ((FRIEND, better), (THIRD, worse), (THIRD, second)):
        peer.hear(sender, message)
    peer.now_ms = 5_000
    effects = peer.hear(FOURTH, tentative(tip, side)[0])
    assert [ask for to, ask in asked(peer, effects) if to == FOURTH.peer_id][:1] != []


def test_a_branch_that_parts_behind_more_common_certificates_than_an_answer_has_is_asked_for_all_the_same() -> None:
    two = identities(2)
    me, friend = two
    head = owned_head(two, CONFIG)
    peer = OneMachine(head, me)
    common, certificates = head, []
    for _ in range(CERTIFICATES_PER_ANSWER + 2):
        certificate, common = tentative(common, [friend])
        certificates.append(certificate)
        peer.hear(friend, certificate)
    own, tip = tentative(common, [me])
    peer.hear(friend, own)  # as if this peer had gone on from there by itself
    ahead = Decided(0, tip.round + 5, tip.hash)

    def next_ask() -> bytes:
        peer.now_ms += 60_000
        return asked(peer, peer.hear(friend, ahead))[0][1].tip

    peer.hear(friend, *certificates[: CERTIFICATES_PER_ANSWER - 1])
    assert next_ask() == tip.hash
    peer.hear(friend, certificates[CERTIFICATES_PER_ANSWER - 1])
    assert next_ask() == common.branch[CERTIFICATES_PER_ANSWER - 1].hash
    peer.hear(friend, *certificates[CERTIFICATES_PER_ANSWER:])
    assert next_ask() == common.hash


def test_strangers_that_show_branches_cost_a_bounded_amount_of_memory() -> None:
    height = Height.of(HEAD)
    _, shown = tentative(HEAD, LEFT)
    for number in range(MAX_PEERS_REMEMBERED + 2):
        height.ask_from(PeerId(number.to_bytes(32, "big")), HEAD)
    height.ask_from(PeerId(bytes(32)), shown)
    assert len(height.shown) == MAX_PEERS_REMEMBERED
    assert height.shown[PeerId(bytes(32))] == shown


def test_a_tentative_tip_is_tentative_in_progress_and_the_last_final_round_stays() -> None:
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, tentative(HEAD, LEFT)[0])
    progress = peer.machine.progress(1)
    assert (progress.round, progress.final_round, progress.tentative) == (3, 1, True)


def test_a_branch_that_was_left_after_a_restart_is_taken_again_once_it_is_shown() -> None:
    (better, best), (worse, other) = two_branches()
    peer = OneMachine(other, ME)  # it had adopted this one before the restart
    peer.hear(FRIEND, better)
    assert peer.machine.head.hash == best.hash
    mixed, tip = tentative(other, [ME, THIRD])  # three distinct voters
    peer.hear(THIRD, mixed)
    assert peer.machine.head.hash == best.hash
    effects = peer.hear(THIRD, worse)
    assert [adopt.head.hash for adopt in adopted(effects)] == [other.hash, tip.hash]
    assert peer.machine.head.hash == tip.hash


def test_the_own_tip_that_is_shown_again_after_a_restart_changes_nothing() -> None:
    _, (worse, other) = two_branches()
    peer = OneMachine(other, ME)
    effects = [*peer.hear(THIRD, worse), *peer.hear(THIRD, worse)]
    assert (adopted(effects), asked(peer, effects), peer.machine.head.hash) == ([], [], other.hash)


def test_tentative_certificates_in_the_wrong_order_lead_to_the_same_tip() -> None:
    first, one = tentative(HEAD, LEFT)
    second, two = tentative(one, LEFT)
    peer = OneMachine(HEAD, ME)
    assert adopted(peer.hear(FRIEND, second)) == []
    assert [adopt.head.hash for adopt in adopted(peer.hear(FRIEND, first))] == [one.hash, two.hash]
    assert peer.machine.head.hash == two.hash


def test_a_peer_whose_branch_is_followed_is_asked_from_where_it_stands() -> None:
    (better, best), (worse, other) = two_branches()
    second, two = tentative(other, LEFT if other.side == TWO else RIGHT)
    peer = OneMachine(HEAD, ME)
    for message in (better, tentative(best, LEFT if best.side == TWO else RIGHT)[0]):
        peer.hear(FRIEND, message)
    peer.hear(THIRD, worse)
    peer.hear(FOURTH, worse, second)
    peer.hear(THIRD, second)  # known from another by now
    assert peer.machine._height.shown[THIRD.peer_id] == two


# --- healing ---------------------------------------------------------------------------------------------------------


def test_a_final_certificate_beats_every_tentative_branch() -> None:
    (better, best), (worse, other) = two_branches()
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, better)
    peer.hear(THIRD, worse)
    healed, head = final(other)
    effects = peer.hear(THIRD, healed)
    assert [adopt.abandoned for adopt in adopted(effects)] == [(best.hash,), ()]  # `other` comes first
    assert (peer.machine.head.hash, peer.machine.head.is_final) == (head.hash, True)
    assert (healed.body.prev, healed.body.via, healed.body.round) == (HEAD.hash, other.hash, 3)


def test_the_own_branch_becomes_final_without_losing_anything() -> None:
    (better, best), _ = two_branches()
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, better)
    healed, head = final(best)
    (adopt,) = adopted(peer.hear(FRIEND, healed))
    assert (adopt.abandoned, peer.machine.head.hash, peer.machine.head.branch) == ((), head.hash, ())


def test_the_work_of_a_branch_that_lost_is_said_again_as_a_late_update() -> None:
    update = update_of(HEAD, FRIEND)
    item = item_of(update, receipt_of(update, PEERS))
    mine = tentative(HEAD, LEFT, [item, item_of(alive_of(HEAD, ME))])
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, update)
    peer.hear(FRIEND, mine[0])
    assert peer.machine.head.hash == mine[1].hash
    assert (ItemKind.UPDATE, FRIEND.peer_id, 2) not in peer.machine._round.updates.slots
    healed, _ = final(HEAD)
    peer.hear(THIRD, healed)
    assert (ItemKind.UPDATE, FRIEND.peer_id, 2) in peer.machine._round.updates.slots


def test_the_work_of_a_branch_that_won_is_not_said_again() -> None:
    update = update_of(HEAD, FRIEND)
    item = item_of(update, receipt_of(update, PEERS))
    mine = tentative(HEAD, LEFT, [item, item_of(alive_of(HEAD, ME))])
    peer = OneMachine(HEAD, ME)
    peer.hear(FRIEND, update, mine[0])
    peer.hear(FRIEND, final(mine[1])[0])
    assert [key for key in peer.machine._round.updates.slots if key[0] is ItemKind.UPDATE] == []


def test_the_state_of_a_branch_that_was_left_is_not_trained_on() -> None:
    (better, best), (worse, other) = two_branches()
    peer = OneMachine(HEAD, ME)
    peer.hear(THIRD, worse)
    peer.hear(FRIEND, better)
    effects = peer.take(fx.StateReady(round=3, head=other.hash))
    assert not any(isinstance(effect, fx.Train) for effect in effects)
    effects = peer.take(fx.StateReady(round=3, head=best.hash))
    assert [effect.base for effect in effects if isinstance(effect, fx.Train)] == [best.hash]


def test_a_result_of_a_branch_that_was_left_makes_no_update() -> None:
    (better, best), (worse, other) = two_branches()
    peer = OneMachine(HEAD, ME)
    peer.hear(THIRD, worse)
    peer.hear(FRIEND, better)
    peer.take(fx.StateReady(round=3, head=best.hash))
    assert peer.sent(peer.take(fx.nothing_trained(3, other.hash))) == []
    said = peer.sent(peer.take(fx.nothing_trained(3, best.hash)))
    assert {
        message.body.more for _, message in said if isinstance(message, Signed) and isinstance(message.body, Alive)
    } == {False}


# --- the tip that the final voting is bound to -----------------------------------------------------------------------


def bound_to_head() -> OneMachine:
    """A voter that has seen a quorum certificate of the final voting for a body on HEAD."""
    terms = Terms(HEAD)
    me = next(peer for peer in PEERS if peer.peer_id == terms.leaders[-1])
    others = [peer for peer in PEERS if peer != me]
    voter = OneMachine(HEAD, me)
    for peer in others:
        voter.hear(peer, alive_of(HEAD, peer))
    items = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
    body = quiet_body(HEAD, items=items)
    leader = next(peer for peer in PEERS if peer.peer_id == terms.leader(0))
    cut, _ = cut_of(HEAD, items)
    announced = CutAnnouncement(HEAD.run.run_id, 0, 2, 0, cut_hash(cut))
    voter.hear(leader, CutMessage(sign(leader, announced), cut))
    proposal = Proposal(HEAD.run.run_id, 0, 2, 0, body_hash(body), None)
    voter.hear(leader, ProposalMessage(sign(leader, proposal), body, b""))
    for peer in others:
        voter.hear(peer, vote_of(terms, peer, Step.PREVOTE, body_hash(body), held=True))
    assert voter.machine._round.voting.pinned_base() == HEAD.hash
    return voter


def test_a_voter_that_is_bound_to_a_tip_stays_on_it_while_a_quorum_can_be_reached() -> None:
    voter = bound_to_head()
    other = [peer for peer in PEERS if peer != voter.me][:2]
    certificate, tip = tentative(HEAD, other)
    assert adopted(voter.hear(other[0], certificate)) == []
    assert voter.machine.head.hash == HEAD.hash
    assert voter.machine._height.branches.best().hash == tip.hash


def test_a_final_certificate_kept_for_the_next_round_is_adopted_once() -> None:
    voter = bound_to_head()
    other = [peer for peer in PEERS if peer != voter.me][:2]
    certificate, tip = tentative(HEAD, other)
    healed, head = final(tip)
    voter.hear(other[0], healed)  # kept: what it builds on is not known
    voter.hear(other[0], certificate)
    effects = voter.hear(other[0], healed)
    assert [adopt.head.hash for adopt in adopted(effects)] == [tip.hash, head.hash]
    assert voter.machine.head.hash == head.hash


def test_a_voter_goes_back_to_the_tip_that_it_is_bound_to_when_all_are_back() -> None:
    voter = bound_to_head()
    friend, third, fourth = (peer for peer in PEERS if peer != voter.me)
    voter.pass_time(WAIT_MS + 40_000, [friend], [voter.me, friend])
    side = tuple(sorted((voter.me.peer_id, friend.peer_id)))
    assert voter.machine.terms.side == side
    certificate, tip = tentative(HEAD, [voter.me, friend])
    voter.hear(friend, certificate)
    assert voter.machine.head.hash == tip.hash
    effects = voter.hear(third, side_of(HEAD, third, [voter.me, third]))
    (back,) = [effect for effect in effects if isinstance(effect, fx.GoBack)]
    assert (back.head.hash, back.abandoned) == (HEAD.hash, (tip.hash,))
    assert set(back.holders) == {friend.peer_id, third.peer_id, fourth.peer_id}
    assert (voter.machine.head.hash, voter.machine.terms.side) == (HEAD.hash, ())
    assert voter.machine._round.voting.qc is not None
    assert voter.machine._round.cuts.known  # what was known of the round on that tip


# --- recovery --------------------------------------------------------------------------------------------------------


def test_the_holder_of_the_key_goes_on_with_whom_it_names_once_the_run_waits() -> None:
    key = next(peer for peer in PEERS if peer.peer_id == HEAD.run.manifest.recovery_key)
    friend = next(peer for peer in PEERS if peer != key)
    holder = OneMachine(HEAD, key, recovery=key)
    holder.pass_time(2 * WAIT_MS)
    effects = holder.take(fx.RecoverWanted(keep=(friend.peer_id,)))
    assert holder.notes(effects)[0] == "recovery: epoch 1 begins with 2 members"
    assert set(holder.machine.head.state.members) == {key.peer_id, friend.peer_id}
    assert (holder.machine.head.epoch, holder.machine.head.is_final) == (1, True)
    told = {to for to, message in holder.sent(effects) if message == Decided(1, 2, holder.machine.head.hash)}
    assert told == {peer.peer_id for peer in PEERS if peer != key}
