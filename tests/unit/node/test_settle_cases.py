"""Every way an update of this peer can end, and what becomes of masters and residual: section 7 by real bodies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec

from spes_p2p.crypto import Identity
from spes_p2p.ids import Digest
from spes_p2p.node.settle import Settlement, Since, own_updates, settle, since, then
from spes_p2p.protocol.body import Body, Tenure
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.messages import Manifest, Signed
from spes_p2p.protocol.state import LeaseRow
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.wire import PieceKind, RefusalReason
from spes_p2p.testing import protocol_cases as cases

FOUNDERS = cases.identities(3)
ME, OTHER = FOUNDERS[0], FOUNDERS[1]
HEAD = cases.owned_head(FOUNDERS, cases.quick_config(lease_rounds=9))
MINE = HEAD.state.shards_of(ME.peer_id)
FIRST, SECOND = MINE


def blobs_of(*updates: Signed) -> dict[int, set[Digest]]:
    """What this peer remembers of its own updates: expert blobs by base round."""
    found: dict[int, set[Digest]] = {}
    for update in updates:
        assert isinstance(update.body, Manifest)
        blobs = {piece.blob for piece in update.body.pieces if piece.kind is PieceKind.EXPERT}
        found[update.body.round] = blobs
    return found


def item(update: Signed) -> Item:
    return cases.item_of(update, cases.receipt_of(update, FOUNDERS))


def alive(head: Head) -> list[Item]:
    return [cases.item_of(cases.alive_of(head, peer)) for peer in FOUNDERS]


def certify(head: Head, items: Iterable[Item], kept: Iterable[int] = ()) -> tuple[Body, Head]:
    body = cases.body_of(head, cases.transition_of(head, items), merge_lists=b"lists", kept=kept)
    return body, next_head(head, body)


def follow(so_far: Since, head: Head, items: Iterable[Item], kept: Iterable[int] = ()) -> tuple[Since, Head, Body]:
    body, after = certify(head, items, kept)
    return then(so_far, head, after, body, ME.peer_id), after, body


def with_owners(head: Head, shard: int, *owners: Identity) -> Head:
    """The same head with other owners of one shard, since genesis."""
    leases = list(head.state.leases)
    tenures = sorted((Tenure(owner.peer_id, 1, 0) for owner in owners), key=lambda tenure: tenure.who)
    leases[shard] = LeaseRow(shard, tuple(tenures))
    return dataclasses.replace(head, state=msgspec.structs.replace(head.state, leases=tuple(leases)))


def reasons(before: Head, body: Body) -> list[RefusalReason | None]:
    return sorted(own_updates(before, body, ME.peer_id).values(), key=str)


def outcome(rules: Settlement) -> tuple[dict[int, str], str, int | None]:
    return dict(rules.masters), rules.residual, rules.accepted_update


# --- accepted --------------------------------------------------------------------------------------------------------


def test_accepted_in_its_own_round() -> None:
    update = cases.update_of(HEAD, ME)
    so_far, after, body = follow(since(HEAD, ME.peer_id), HEAD, [item(update)], kept=[3])
    rules = settle(so_far, after, ME.peer_id, blobs_of(update))
    assert outcome(rules) == ({FIRST: "carry", SECOND: "carry"}, "advance", 2)
    assert (rules.owned, rules.kept_parts, reasons(HEAD, body)) == (MINE, (3,), [None])


def test_accepted_late_while_the_update_of_the_round_is_still_under_way() -> None:
    old = cases.update_of(HEAD, ME)
    _, middle = certify(HEAD, alive(HEAD))
    new = cases.update_of(middle, ME)
    so_far, after, _ = follow(since(middle, ME.peer_id), middle, [item(old), cases.item_of(new)])
    rules = settle(so_far, after, ME.peer_id, blobs_of(old, new))
    # what the rounding of the older one took comes back; what was trained since began from a row that is no more
    assert outcome(rules) == ({FIRST: "carry", SECOND: "carry"}, "advance", 2)


def test_a_late_update_of_experts_whose_row_has_not_changed_is_whole() -> None:
    old = cases.update_of(HEAD, ME)
    _, middle = certify(HEAD, [item(cases.update_of(HEAD, OTHER))])
    body, after = certify(middle, [item(old)])
    assert body.refused == ()
    (blob,) = after.state.shards[FIRST].blobs
    assert blob.blob in blobs_of(old)[2]
    row = after.state.row(ME.peer_id)
    assert row is not None
    assert (row.accepted, row.base_round) == (1, 2)


# --- accepted in part ------------------------------------------------------------------------------------------------


def test_a_shard_with_two_owners_starts_from_their_mean() -> None:
    shared = with_owners(HEAD, FIRST, ME, OTHER)
    mine, other = cases.update_of(shared, ME), cases.update_of(shared, OTHER)
    so_far, after, _ = follow(since(shared, ME.peer_id), shared, [item(mine), item(other)])
    assert len(after.state.shards[FIRST].blobs) == 2
    rules = settle(so_far, after, ME.peer_id, blobs_of(mine))
    assert outcome(rules) == ({SECOND: "carry"}, "advance", 2)


def test_experts_from_a_row_that_a_co_owner_has_changed_are_refused_and_psi_counts() -> None:
    shared = with_owners(HEAD, FIRST, ME, OTHER)
    mine = cases.update_of(shared, ME)
    _, middle = certify(shared, [item(cases.update_of(shared, OTHER))])
    so_far, after, body = follow(since(middle, ME.peer_id), middle, [item(mine)])
    assert reasons(middle, body) == [RefusalReason.BASE_ROW]
    assert [contribution.peer for contribution in cases.transition_of(middle, [item(mine)]).contributions] == [
        ME.peer_id
    ]
    rules = settle(so_far, after, ME.peer_id, blobs_of(mine))
    assert outcome(rules) == ({SECOND: "carry"}, "advance", 2)


def test_experts_of_a_shard_that_was_lost_are_refused_and_psi_counts() -> None:
    mine = cases.update_of(HEAD, ME)
    _, middle = certify(HEAD, alive(HEAD))
    lost = with_owners(middle, FIRST, OTHER)
    so_far, after, body = follow(since(HEAD, ME.peer_id), lost, [item(mine)])
    assert reasons(lost, body) == [RefusalReason.NOT_OWNER]
    rules = settle(so_far, after, ME.peer_id, blobs_of(mine))
    assert FIRST not in rules.owned
    assert outcome(rules) == ({SECOND: "carry"}, "advance", 2)


def test_a_shard_that_was_lost_and_won_back_starts_from_the_table() -> None:
    lost = with_owners(HEAD, FIRST, OTHER)
    so_far, middle, _ = follow(since(HEAD, ME.peer_id), lost, alive(lost))
    again = with_owners(middle, FIRST, ME)
    so_far, after, _ = follow(so_far, again, alive(again))
    rules = settle(so_far, after, ME.peer_id, {})
    assert set(MINE) <= set(rules.owned)
    assert outcome(rules) == ({SECOND: "keep"}, "keep", None)


# --- not accepted ----------------------------------------------------------------------------------------------------


def test_not_yet_in_any_certificate() -> None:
    update = cases.update_of(HEAD, ME)
    so_far, after, body = follow(since(HEAD, ME.peer_id), HEAD, [cases.item_of(update)])
    assert reasons(HEAD, body) == []
    rules = settle(so_far, after, ME.peer_id, blobs_of(update))
    assert outcome(rules) == ({FIRST: "keep", SECOND: "keep"}, "keep", None)


def test_expired_without_having_been_refused() -> None:
    update, head = cases.update_of(HEAD, ME), HEAD
    so_far = since(HEAD, ME.peer_id)
    for _ in range(4):
        so_far, head, _ = follow(so_far, head, alive(head))
    rules = settle(so_far, head, ME.peer_id, blobs_of(update))
    assert outcome(rules) == ({FIRST: "keep", SECOND: "keep"}, "keep", None)


def test_a_row_that_changed_under_an_update_to_come_gives_the_start() -> None:
    shared = with_owners(HEAD, FIRST, ME, OTHER)
    so_far, after, _ = follow(since(shared, ME.peer_id), shared, [item(cases.update_of(shared, OTHER))])
    rules = settle(so_far, after, ME.peer_id, {})
    assert outcome(rules) == ({SECOND: "keep"}, "keep", None)


def test_superseded_by_a_newer_one_in_the_same_cut() -> None:
    old = cases.update_of(HEAD, ME)
    _, middle = certify(HEAD, alive(HEAD))
    new = cases.update_of(middle, ME)
    so_far, after, body = follow(since(middle, ME.peer_id), middle, [item(old), item(new)])
    assert reasons(middle, body) == [RefusalReason.SUPERSEDED, None]
    rules = settle(so_far, after, ME.peer_id, blobs_of(old, new))
    assert outcome(rules) == ({FIRST: "carry", SECOND: "carry"}, "advance", 3)
    (blob,) = after.state.shards[FIRST].blobs
    assert blob.blob in blobs_of(new)[3]


def test_one_that_left_owns_nothing_and_settles_nothing() -> None:
    so_far, after, _ = follow(since(HEAD, ME.peer_id), HEAD, [])
    gone = dataclasses.replace(
        after,
        state=msgspec.structs.replace(
            after.state,
            roster=tuple(row for row in after.state.roster if row.peer != ME.peer_id),
            leases=tuple(LeaseRow(row.shard, ()) if row.shard in MINE else row for row in after.state.leases),
        ),
    )
    rules = settle(then(so_far, after, gone, certify(after, [])[0], ME.peer_id), gone, ME.peer_id, {})
    assert (rules.owned, *outcome(rules)) == ((), {}, "keep", None)
