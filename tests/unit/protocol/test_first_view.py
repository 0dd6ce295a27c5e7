"""A leader of the first view waits for the updates that are under way, and a voter sees to it."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.digests import digest
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.messages import Signed, ViewChange
from spes_p2p.protocol.wire import NO_DIGEST, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import alive_of, cut_of, identities, item_of, owned_head, receipt_of, update_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
PROTOCOL = HEAD.run.config.protocol
PREVOTE = Step.PREVOTE
PATIENCE_MS = PROTOCOL.view_timeout(0) // 2


def in_first_view() -> tuple[OneVoter, Signed, int]:
    """A voter whose view 0 has begun with one update that has no receipt yet; when half of T and when T - half a view
    time-out will have passed are counted from then."""
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.others[1])
    voter.hear_all(*(alive_of(HEAD, peer) for peer in PEERS if peer.peer_id != update.peer), update)
    assert voter.round.voting.view == 0
    return voter, update, voter.terms.transfer_budget_ms


def hasty(voter: OneVoter, update: Signed, view: int = 0) -> bytes:
    """The leader of a view proposes a cut in which the author of the update is alive and no more."""
    alive = [item_of(alive_of(HEAD, peer)) for peer in PEERS if peer.peer_id != update.peer]
    return voter.propose(voter.quiet_body([*alive, item_of(update)], view), view)


def test_a_cut_without_an_update_that_was_under_way_gets_nil_if_its_receipt_comes_in_time() -> None:
    voter, update, budget_ms = in_first_view()
    hasty(voter, update)
    voter.wait(budget_ms // 2 - 100)
    assert voter.votes(PREVOTE) == []
    voter.round.updates.add_receipt(receipt_of(update, PEERS))
    voter.wait(100)
    assert voter.votes(PREVOTE) == [(NO_DIGEST, False)]
    notes = [effect.text for effect in voter.effects if isinstance(effect, fx.Notify)]
    assert "view 0: prevote nil: the cut did not wait for an update" in notes


def test_an_update_whose_receipt_comes_later_may_be_left_out_once_t_has_nearly_passed() -> None:
    voter, update, budget_ms = in_first_view()
    identity = hasty(voter, update)
    voter.wait(budget_ms // 2 + 100)
    voter.round.updates.add_receipt(receipt_of(update, PEERS))
    voter.wait(budget_ms - PATIENCE_MS - voter.context.now_ms - 1)
    assert voter.votes(PREVOTE) == []
    voter.wait(1)
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_the_round_asks_to_be_called_when_the_wait_is_over() -> None:
    voter, update, budget_ms = in_first_view()
    assert voter.round.voting.wakes_at_ms() is None
    hasty(voter, update)
    assert voter.round.voting.wakes_at_ms() == budget_ms - PATIENCE_MS
    while (due_ms := voter.round.deadline_ms()) is not None and not voter.votes(PREVOTE):
        voter.wait(due_ms - voter.context.now_ms)
    assert voter.context.now_ms == budget_ms - PATIENCE_MS
    assert voter.round.voting.wakes_at_ms() is None


def test_an_update_that_came_after_the_first_view_began_may_be_left_out_at_once() -> None:
    voter = OneVoter(HEAD, PEERS)
    alive = [alive_of(HEAD, peer) for peer in PEERS]
    voter.hear_all(*alive)
    voter.wait(1)
    update = update_of(HEAD, voter.others[1])
    voter.hear_all(update)
    voter.round.updates.add_receipt(receipt_of(update, PEERS))
    identity = voter.propose(voter.quiet_body([item_of(signed) for signed in alive]))
    assert voter.votes(PREVOTE) == [(identity, True)]


def test_a_leader_of_a_later_view_need_not_wait() -> None:
    voter, update, _ = in_first_view()
    voter.others_ask_for_view(1, 3)
    identity = hasty(voter, update, view=1)
    assert voter.votes(PREVOTE, 1) == [(identity, True)]


def test_for_a_voter_that_trains_for_long_the_first_view_counts_from_when_it_began_for_the_others() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.training = True
    early = [update_of(HEAD, peer) for peer in voter.others[:2]]
    voter.hear_all(*early)  # half of four members
    assert voter.round.updates.half_at_ms == 0
    voter.wait(PROTOCOL.train_grace_ms)
    assert voter.round.cuts.first_view_from_ms(PROTOCOL.train_grace_ms + 3_000) == PROTOCOL.train_grace_ms
    assert voter.round.cuts.first_view_from_ms(2_000) == 2_000
    voter.wait(1)
    late = update_of(HEAD, voter.others[2])
    voter.hear_all(late)
    left_out = voter.round.cuts.left_out([], before_ms=PROTOCOL.train_grace_ms)
    assert {held.signed.peer for held in left_out} == {signed.peer for signed in early}
    named = [item_of(signed, receipt_of(signed, PEERS)) for signed in early]
    assert voter.round.cuts.left_out(named, before_ms=PROTOCOL.train_grace_ms) == []


@pytest.mark.parametrize(
    ("before_ms", "cut_before_ms", "hasty_leader"),
    [(1, 0, False), (PROTOCOL.view_timeout(0), 0, True), (PATIENCE_MS, PATIENCE_MS - 1, False), (4_000, 3_500, True)],
)
def test_an_update_that_comes_just_before_the_grace_ends_may_not_have_reached_the_leader(
    before_ms: int, cut_before_ms: int, hasty_leader: bool
) -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.training = True  # view 0 begins at the end of the grace
    early = [update_of(HEAD, peer) for peer in PEERS if peer != voter.others[1] and peer != voter.me]
    voter.hear_all(*early)
    for signed in early:
        voter.round.updates.add_receipt(receipt_of(signed, PEERS))
    voter.wait(PROTOCOL.train_grace_ms - before_ms)
    slow = update_of(HEAD, voter.others[1])
    voter.hear_all(slow)
    voter.round.updates.add_receipt(receipt_of(slow, PEERS))
    voter.wait(before_ms - cut_before_ms)
    items = [item_of(signed, receipt_of(signed, PEERS)) for signed in early]
    cut, _ = cut_of(HEAD, items)
    known = voter.round.cuts.learn(cut, ())
    voter.wait(cut_before_ms)
    due_ms = voter.round.cuts.half_due_ms
    assert due_ms == voter.context.now_ms == PROTOCOL.train_grace_ms
    left_out = voter.round.cuts.left_out(known.items or (), voter.round.cuts.under_way_by_ms(known, due_ms))
    assert [held.signed for held in left_out] == ([slow] if hasty_leader else [])


def test_a_fast_leader_waits_for_half_of_the_manifests_and_the_grace_but_no_longer_than_t() -> None:
    voter = OneVoter(HEAD, PEERS)
    cuts, budget_ms, grace_ms = voter.round.cuts, voter.terms.transfer_budget_ms, PROTOCOL.train_grace_ms
    voter.context.now_ms = PROTOCOL.round_min
    began_ms = voter.context.now_ms
    assert not cuts.leader_may_cut(began_ms)
    assert cuts.leader_may_cut(began_ms - budget_ms)
    updates = [update_of(HEAD, peer) for peer in voter.others]
    for update in updates[:2]:
        voter.hear_all(update)
        voter.round.updates.add_receipt(receipt_of(update, PEERS))
    assert voter.round.updates.half_at_ms == began_ms
    voter.round.voting.begin(0)
    assert voter.round.voting.wakes_at_ms() == began_ms + grace_ms
    voter.context.now_ms = began_ms + grace_ms - 1
    assert not cuts.leader_may_cut(voter.context.now_ms)
    voter.context.now_ms += 1
    assert cuts.leader_may_cut(voter.context.now_ms)
    voter.hear_all(updates[2], alive_of(HEAD, voter.me))
    assert not cuts.leader_may_cut(voter.context.now_ms)  # all are in, and one has no receipt yet


@pytest.mark.parametrize(("elsewhere", "views_asked_for"), [(True, {1}), (False, set())])
def test_a_first_view_that_its_leader_has_used_on_another_tip_is_lost_and_the_next_is_asked_for_at_once(
    elsewhere: bool, views_asked_for: set[int]
) -> None:
    voter = OneVoter(HEAD, PEERS)
    alive = [alive_of(HEAD, peer) for peer in PEERS]
    body = voter.quiet_body([item_of(signed) for signed in alive])
    voter.propose(msgspec.structs.replace(body, via=digest("another tip")) if elsewhere else body)
    assert voter.round.voting.view == -1
    voter.hear_all(*alive)
    assert voter.round.voting.view == 0
    asked = [
        message.body.view
        for _, message in voter.sent
        if isinstance(message, Signed) and isinstance(message.body, ViewChange)
    ]
    assert set(asked) == views_asked_for
