"""Verdicts on a node's own updates."""

from __future__ import annotations

import dataclasses

import msgspec

from spes_p2p.ids import RoundNumber
from spes_p2p.node.own_updates import BRANCH_LOST, KEPT, OwnUpdates
from spes_p2p.protocol.codec import sign
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.messages import Leave
from spes_p2p.protocol.state import State
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import NO_DIGEST, RefusalReason
from spes_p2p.storage.ledger import Ledger, OwnUpdate
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME = FOUNDERS[0]


def own(ledger: Ledger, head: Head, notes: list[str] | None = None) -> OwnUpdates:
    told = notes if notes is not None else []
    return OwnUpdates(ME.peer_id, head, ledger, lambda level, text: told.append(text))


def adopt(updates: OwnUpdates, head: Head, items: list[Item]) -> Head:
    body = cases.body_of(head, cases.transition_of(head, items), merge_lists=b"lists")
    after = next_head(head, body)
    updates.adopted(head, after, body)
    return after


def verdicts(updates: OwnUpdates) -> list[tuple[int, str]]:
    return [(update.round, update.verdict) for update in updates.latest(99)]


def mine(head: Head) -> Item:
    update = cases.update_of(head, ME)
    return cases.item_of(update, cases.receipt_of(update, FOUNDERS))


def silence(head: Head) -> list[Item]:
    return [cases.item_of(cases.alive_of(head, peer)) for peer in FOUNDERS]


def test_accepted_update_counts_its_tokens(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(head.round + 1, 640)
    assert verdicts(updates) == [(2, "pending")]
    assert updates.tokens_certified == 0
    adopt(updates, head, [mine(head)])
    assert verdicts(updates) == [(2, "accepted")]
    assert updates.tokens_certified == 640


def test_update_in_a_later_certificate_is_accepted_late(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates, item = own(ledger, head), mine(head)
    updates.published(2, 640)
    after = adopt(updates, head, silence(head))
    adopt(updates, after, [item])
    assert verdicts(updates) == [(2, "accepted late")]


def leave(head: Head) -> Item:
    return cases.item_of(sign(ME, Leave(head.run.run_id, head.epoch, head.round + 1, NO_DIGEST, 0)))


def test_update_in_the_certificate_that_lets_its_author_go_is_accepted(ledger: Ledger) -> None:
    notes: list[str] = []
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head, notes)
    updates.published(2, 1000)
    after = adopt(updates, head, [mine(head), leave(head)])
    assert after.state.row(ME.peer_id) is None
    assert verdicts(updates) == [(2, "accepted")]
    assert updates.tokens_certified == 1000
    for _ in range(3):
        after = adopt(updates, after, [cases.item_of(cases.alive_of(after, peer)) for peer in FOUNDERS[1:]])
    assert verdicts(own(ledger, after, notes)) == [(2, "accepted")]
    assert notes == []


def test_late_update_in_the_certificate_that_lets_its_author_go_is_accepted_late(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates, item = own(ledger, head), mine(head)
    updates.published(2, 1000)
    after = adopt(updates, head, silence(head))
    updates.published(3, 900)
    after = adopt(updates, after, [item, leave(after)])
    assert verdicts(updates)[0] == (2, "accepted late")


def test_leaver_whose_update_came_too_late_for_its_last_certificate_is_told(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(2, 1000)
    after = adopt(updates, head, [leave(head), *silence(head)[1:]])
    for _ in range(3):
        after = adopt(updates, after, [cases.item_of(cases.alive_of(after, peer)) for peer in FOUNDERS[1:]])
    assert verdicts(updates) == [(2, "not included")]


def test_update_that_no_certificate_took_in_time_is_not_included(ledger: Ledger) -> None:
    notes: list[str] = []
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head, notes)
    updates.published(2, 640)
    for _ in range(3):
        head = adopt(updates, head, silence(head))
    assert verdicts(updates) == [(2, "not included")]
    assert notes == ["this node's update of round 2 was not included"]


def test_update_that_members_refused_and_no_certificate_took_says_why(ledger: Ledger) -> None:
    notes: list[str] = []
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head, notes)
    updates.published(2, 640)
    updates.refused(2, RefusalReason.NORM_BOUND)
    for _ in range(3):
        head = adopt(updates, head, silence(head))
    assert verdicts(updates) == [(2, "refused: norm bound")]
    assert notes == ["this node's update of round 2 was refused: norm bound"]
    assert updates.tokens_certified == 0


def test_newer_update_does_not_hide_why_the_one_before_was_refused(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(2, 640)
    updates.refused(2, RefusalReason.NOT_FINITE)
    after = adopt(updates, head, silence(head))
    updates.published(3, 640)
    adopt(updates, after, [mine(after)])
    assert verdicts(updates) == [(2, "refused: not finite"), (3, "accepted")]


def test_update_that_a_certificate_took_is_accepted_whoever_refused_it(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(2, 640)
    updates.refused(2, RefusalReason.NORM_BOUND)
    updates.refused(7, RefusalReason.NORM_BOUND)  # none of this node's
    adopt(updates, head, [mine(head)])
    assert verdicts(updates) == [(2, "accepted")]


def test_newer_update_supersedes_an_older_one(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(2, 640)
    after = adopt(updates, head, silence(head))
    updates.published(3, 640)
    adopt(updates, after, [mine(after)])
    assert verdicts(updates) == [(2, "superseded"), (3, "accepted")]


def test_verdict_that_a_crash_cut_off_is_given_at_the_next_start(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    own(ledger, head).published(2, 640)
    after = cases.follow(head, [mine(head)])
    again = own(ledger, after)
    assert verdicts(again) == [(2, "accepted")]
    assert again.tokens_certified == 640
    assert own(ledger, after).tokens_certified == 640


def test_memory_holds_the_newest_updates_and_the_sum_of_all(ledger: Ledger) -> None:
    for number in range(2, KEPT + 12):
        ledger.record_update(OwnUpdate(round=RoundNumber(number), verdict="accepted", tokens=10))
    head = cases.owned_head(FOUNDERS)
    roster = tuple(msgspec.structs.replace(row, base_round=KEPT + 11) for row in head.state.roster)
    state = State(roster, head.state.leases, head.state.shards)
    updates = own(ledger, dataclasses.replace(head, round=KEPT + 11, state=state))
    assert updates.tokens_certified == 10 * (KEPT + 10)
    assert [number for number, _ in verdicts(updates)] == list(range(12, KEPT + 12))
    assert [update.round for update in updates.latest(2)] == [KEPT + 10, KEPT + 11]


def test_update_of_a_lost_branch_counts_no_more_unless_it_is_accepted_late(ledger: Ledger) -> None:
    fork = cases.owned_head(FOUNDERS)
    notes: list[str] = []
    updates = own(ledger, fork, notes)
    updates.published(fork.round + 1, 640)
    item = mine(fork)
    adopt(updates, fork, [item])
    assert updates.tokens_certified == 640
    updates.branch_lost(fork)
    assert verdicts(updates) == [(2, BRANCH_LOST)]
    assert updates.tokens_certified == 0
    assert any("update of round 2 was branch lost" in note for note in notes)
    other = adopt(updates, fork, silence(fork))
    assert verdicts(updates) == [(2, BRANCH_LOST)]
    again = own(ledger, other)
    adopt(again, other, [item])
    assert verdicts(again) == [(2, "accepted late")]
    assert again.tokens_certified == 640


def test_update_of_a_lost_branch_stays_lost_once_it_is_too_late(ledger: Ledger) -> None:
    head = cases.owned_head(FOUNDERS)
    updates = own(ledger, head)
    updates.published(head.round + 1, 640)
    adopt(updates, head, [mine(head)])
    updates.branch_lost(head)
    for _ in range(3):
        head = adopt(updates, head, silence(head))
    assert verdicts(updates) == [(2, BRANCH_LOST)]
    assert verdicts(own(ledger, head)) == [(2, BRANCH_LOST)]


def test_loss_that_a_crash_kept_from_the_verdicts_is_found_at_the_start(ledger: Ledger) -> None:
    fork = cases.owned_head(FOUNDERS)
    updates = own(ledger, fork)
    updates.published(fork.round + 1, 640)
    adopt(updates, fork, [mine(fork)])
    again = own(ledger, fork)
    assert verdicts(again) == [(2, BRANCH_LOST)]
    assert again.tokens_certified == 0
