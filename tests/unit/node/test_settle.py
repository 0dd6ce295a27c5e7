"""What certificates mean for an owner's masters and residual: docs/protocol.md, section 7, clause by clause."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.ids import Digest
from spes_p2p.node.settle import Since, accepted_base, branch_lost, own_updates, settle, since, start_spec, then
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.messages import Manifest, Signed
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import PieceKind, RefusalReason
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME, OTHERS = FOUNDERS[0], FOUNDERS[1:]


def blobs_of(update: Signed) -> set[Digest]:
    assert isinstance(update.body, Manifest)
    return {piece.blob for piece in update.body.pieces if piece.kind is PieceKind.EXPERT}


def accepted_item(update: Signed) -> Item:
    return cases.item_of(update, cases.receipt_of(update, FOUNDERS))


def go_on(so_far: Since, head: Head, items: Iterable[Item], kept: Iterable[int] = ()) -> tuple[Since, Head]:
    body = cases.body_of(head, cases.transition_of(head, items), merge_lists=b"lists", kept=kept)
    after = next_head(head, body)
    return then(so_far, head, after, body, ME.peer_id), after


def begin() -> tuple[Since, Head]:
    head = cases.owned_head(FOUNDERS)
    return since(head, ME.peer_id), head


def test_without_a_start_every_master_is_the_agreed_start() -> None:
    _, head = begin()
    rules = settle(None, head, ME.peer_id, {})
    assert rules.owned == head.state.shards_of(ME.peer_id)
    assert (rules.masters, rules.residual, rules.accepted_update) == ({}, "keep", None)


def test_master_of_an_accepted_update_carries_what_rounding_took() -> None:
    so_far, head = begin()
    update = cases.update_of(head, ME)
    so_far, after = go_on(so_far, head, [accepted_item(update)], kept=[1])
    rules = settle(so_far, after, ME.peer_id, {head.round + 1: blobs_of(update)})
    assert rules.masters == dict.fromkeys(head.state.shards_of(ME.peer_id), "carry")
    assert (rules.residual, rules.accepted_update, rules.kept_parts) == ("advance", head.round + 1, (1,))


def test_master_stays_as_trained_while_its_update_is_still_to_come() -> None:
    so_far, head = begin()
    so_far, after = go_on(so_far, head, [cases.item_of(cases.alive_of(head, ME))])
    rules = settle(so_far, after, ME.peer_id, {head.round + 1: {head.parts[0]}})
    assert rules.masters == dict.fromkeys(head.state.shards_of(ME.peer_id), "keep")
    assert (rules.residual, rules.accepted_update) == ("keep", None)


def test_late_update_carries_too() -> None:
    so_far, head = begin()
    update = cases.update_of(head, ME)
    so_far, after = go_on(so_far, head, [accepted_item(cases.update_of(head, OTHERS[0]))])
    so_far, late = go_on(since(after, ME.peer_id), after, [accepted_item(update)])
    rules = settle(so_far, late, ME.peer_id, {head.round + 1: blobs_of(update)})
    assert set(rules.masters.values()) == {"carry"}
    assert rules.accepted_update == head.round + 1


def test_update_whose_blobs_are_not_in_the_rows_gives_the_start() -> None:
    so_far, head = begin()
    update = cases.update_of(head, ME)
    so_far, after = go_on(so_far, head, [accepted_item(update)])
    rules = settle(so_far, after, ME.peer_id, {})  # the blobs published are not known any more
    assert rules.masters == {}
    assert rules.residual == "advance"


def test_certificates_that_the_trainer_skipped_count_all() -> None:
    so_far, head = begin()
    update = cases.update_of(head, ME)
    so_far, middle = go_on(so_far, head, [accepted_item(update)], kept=[2])
    so_far, after = go_on(so_far, middle, [accepted_item(cases.update_of(middle, OTHERS[0]))])
    rules = settle(so_far, after, ME.peer_id, {head.round + 1: blobs_of(update)})
    assert set(rules.masters.values()) == {"carry"}
    # the parts kept by the certificate that accepted the update, not those of the newest one
    assert (rules.accepted_update, rules.kept_parts) == (head.round + 1, (2,))


def test_master_is_kept_over_several_certificates_that_do_not_name_the_peer() -> None:
    head = cases.owned_head(FOUNDERS, cases.quick_config(lease_rounds=5))
    so_far = since(head, ME.peer_id)
    for _ in range(2):
        so_far, head = go_on(so_far, head, [cases.item_of(cases.alive_of(head, peer)) for peer in FOUNDERS])
    rules = settle(so_far, head, ME.peer_id, {})
    assert set(rules.masters.values()) == {"keep"}


def test_refused_update_gives_the_start_and_keeps_the_residual() -> None:
    so_far, head = begin()
    named = Since(before=so_far.before, owned=so_far.owned, named=True)
    rules = settle(named, head, ME.peer_id, {})
    assert rules.masters == {}
    assert rules.residual == "keep"


def test_superseded_update_is_found_in_the_cut_with_its_reason() -> None:
    _, head = begin()
    old = accepted_item(cases.update_of(head, ME))
    after = cases.follow(head, [cases.item_of(cases.alive_of(head, peer)) for peer in FOUNDERS])
    body = cases.body_of(after, cases.transition_of(after, [old, accepted_item(cases.update_of(after, ME))]))
    assert sorted(own_updates(after, body, ME.peer_id).values(), key=str) == [RefusalReason.SUPERSEDED, None]
    assert own_updates(after, body, OTHERS[0].peer_id) == {}
    assert accepted_base(after, next_head(after, body), ME.peer_id) == after.round + 1


def test_start_of_a_round_names_the_rows_of_the_head() -> None:
    _, head = begin()
    spec = start_spec(head, b"")
    assert spec.round == head.round
    assert spec.parts == head.parts
    assert spec.shards[0] == tuple((share.blob, share.tokens) for share in head.state.shards[0].blobs)
    assert spec.receivers == ()


def test_a_lost_branch_leaves_neither_residual_nor_masters_whatever_is_accepted_afterwards() -> None:
    _, head = begin()
    update = cases.update_of(head, ME)
    so_far, after = go_on(branch_lost(head), head, [accepted_item(update)])
    rules = settle(so_far, after, ME.peer_id, {head.round + 1: blobs_of(update)})
    assert (rules.masters, rules.residual, rules.accepted_update) == ({}, "zero", None)
    assert rules.owned == after.state.shards_of(ME.peer_id)
