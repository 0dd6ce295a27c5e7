import math

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol.body import CutItem
from spes_p2p.protocol.codec import encode, pack_float, receipt_hash, sign, statement_hash
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import (
    Ack,
    Alive,
    Claim,
    Evidence,
    Leave,
    Manifest,
    Piece,
    Receipt,
    Signed,
    SignedBody,
)
from spes_p2p.protocol.receipts import Tally, check_receipt, mark_of
from spes_p2p.protocol.statements import Item, check_cut, check_statement
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind
from spes_p2p.testing.protocol_cases import (
    ack_of,
    alive_of,
    claim_of,
    cut_of,
    follow,
    genesis_of,
    identities,
    item_of,
    join_of,
    owned_head,
    receipt_of,
    trained_items,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
FOUR = owned_head(PEERS)
TERMS = Terms(FOUR)
LATER = follow(follow(FOUR, trained_items(FOUR, PEERS)), [])


def manifest_of(head: Head, peer: Identity) -> Manifest:
    body = update_of(head, peer).body
    assert isinstance(body, Manifest)
    return body


def refuses(signed: Signed, why: str, terms: Terms = TERMS) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        check_statement(terms, signed, verify)


def test_honest_statements_are_valid() -> None:
    for signed in (
        alive_of(FOUR, PEERS[0]),
        claim_of(FOUR, PEERS[1]),
        update_of(FOUR, PEERS[2]),
        join_of(FOUR, identity_of("x")),
        sign(PEERS[3], Leave(FOUR.run.run_id, 0, 2, NO_DIGEST, 0)),
    ):
        check_statement(TERMS, signed, verify)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Alive(bytes(32), 0, 2, True), "another run"),
        (Alive(FOUR.run.run_id, 1, 2, True), "another run or epoch"),
        (Alive(FOUR.run.run_id, 0, 1, True), "alive of round 1 in round 2"),
        (Claim(FOUR.run.run_id, 0, 3, 1), "claim of round 3 in round 2"),
    ],
)
def test_statements_of_another_run_epoch_or_round_are_refused(body: SignedBody, why: str) -> None:
    refuses(sign(PEERS[0], body), why)


def test_a_stranger_may_only_join() -> None:
    refuses(alive_of(FOUR, identity_of("x")), "not a member")
    refuses(sign(identity_of("x"), join_of(FOUR, identity_of("y")).body), "not admitted")


def test_claims_hold_for_two_more_rounds_and_alive_for_its_own() -> None:
    claim, alive = claim_of(FOUR, PEERS[0]), alive_of(FOUR, PEERS[0])
    check_statement(Terms(LATER), claim, verify)
    refuses(alive, "alive of round 2 in round 4", Terms(LATER))
    refuses(claim, "claim of round 2 in round 5", Terms(follow(LATER, [])))


def test_a_leave_that_was_served_throws_nobody_out_who_came_back() -> None:
    leave = sign(PEERS[0], Leave(FOUR.run.run_id, 0, 2, NO_DIGEST, 0))
    others = PEERS[1:]
    gone = follow(FOUR, [item_of(leave), *(item_of(alive_of(FOUR, peer)) for peer in others)])
    back = follow(gone, [item_of(join_of(gone, PEERS[0])), *(item_of(alive_of(gone, peer)) for peer in others)])
    assert PEERS[0].peer_id not in gone.state.members
    assert PEERS[0].peer_id in back.state.members
    refuses(leave, "leave from before its peer was last there", Terms(back))


def test_a_leave_that_no_cut_had_holds_as_long_as_its_author_says_nothing_new() -> None:
    leave = sign(PEERS[0], Leave(FOUR.run.run_id, 0, 2, NO_DIGEST, 0))
    second = follow(FOUR, [item_of(alive_of(FOUR, peer)) for peer in PEERS])
    third = follow(second, [item_of(alive_of(second, peer)) for peer in PEERS])
    silent = follow(second, [item_of(alive_of(second, peer)) for peer in PEERS[1:]])
    check_statement(Terms(second), leave, verify)
    check_statement(Terms(silent), leave, verify)
    refuses(leave, "last there", Terms(third))


def test_an_update_is_bound_to_the_certificate_it_was_trained_from() -> None:
    check_statement(Terms(LATER), update_of(FOUR, PEERS[0]), verify)
    refuses(update_of(FOUR, PEERS[0]), "manifest of round 2 in round 5", Terms(follow(LATER, [])))
    forged = sign(PEERS[0], msgspec.structs.replace(manifest_of(FOUR, PEERS[0]), prev=bytes(32)))
    refuses(forged, "another certificate")


def test_an_update_has_every_part_once_and_its_shards_ascending() -> None:
    manifest = manifest_of(FOUR, PEERS[0])
    for pieces in (
        manifest.pieces[1:],
        (manifest.pieces[1], manifest.pieces[0], *manifest.pieces[2:]),
        (*manifest.pieces, manifest.pieces[-1]),
        (*manifest.pieces, manifest.pieces[0]),
    ):
        refuses(sign(PEERS[0], msgspec.structs.replace(manifest, pieces=pieces)), "update does not")
    far = msgspec.structs.replace(manifest.pieces[-1], index=8)
    refuses(sign(PEERS[0], msgspec.structs.replace(manifest, pieces=(*manifest.pieces, far))), "does not exist")


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0, 1e61])
def test_a_squared_norm_is_finite_and_not_negative(norm: float) -> None:
    manifest = manifest_of(FOUR, PEERS[0])
    first = msgspec.structs.replace(manifest.pieces[0], squared_norm=pack_float(norm))
    refuses(sign(PEERS[0], msgspec.structs.replace(manifest, pieces=(first, *manifest.pieces[1:]))), "squared norm")


def test_a_piece_is_no_larger_than_the_run_prescribes() -> None:
    manifest = manifest_of(FOUR, PEERS[0])
    large: Piece = msgspec.structs.replace(manifest.pieces[0], size_bytes=10_001)
    refuses(
        sign(PEERS[0], msgspec.structs.replace(manifest, pieces=(large, *manifest.pieces[1:]))), "10000 are the most"
    )


def test_a_wrong_signature_is_found_before_the_contents_are_looked_at() -> None:
    signed = alive_of(FOUR, PEERS[0])
    refuses(msgspec.structs.replace(signed, peer=PEERS[1].peer_id), "wrong signature")
    evidence = Evidence(FOUR.run.run_id, 0, 2, b"\xc1", b"\xc1")
    refuses(msgspec.structs.replace(sign(PEERS[0], evidence), signature=bytes(64)), "wrong signature")


def test_evidence_proves_two_values_for_one_slot() -> None:
    first, second = update_of(FOUR, PEERS[1]), update_of(FOUR, PEERS[1], note="other")
    good = Evidence(FOUR.run.run_id, 0, 2, encode(first), encode(second))
    check_statement(TERMS, sign(PEERS[0], good), verify)
    same = msgspec.structs.replace(good, second=encode(first))
    refuses(sign(PEERS[0], same), "proves nothing")
    alive = [encode(alive_of(FOUR, PEERS[1], more)) for more in (True, False)]
    refuses(sign(PEERS[0], Evidence(FOUR.run.run_id, 0, 2, *alive)), "proves nothing")
    forged = msgspec.structs.replace(second, signature=bytes(64))
    refuses(sign(PEERS[0], msgspec.structs.replace(good, second=encode(forged))), "wrong signature")
    x = identity_of("x")
    strange = [encode(sign(x, manifest_of(FOUR, peer))) for peer in PEERS[:2]]
    check_statement(TERMS, sign(PEERS[0], Evidence(FOUR.run.run_id, 0, 2, *strange)), verify)  # beside a join


# --- receipts --------------------------------------------------------------------------------------------------------

UPDATE = update_of(FOUR, PEERS[0])
MANIFEST = manifest_of(FOUR, PEERS[0])
PIECES = len(MANIFEST.pieces)


def check(receipt: Receipt, terms: Terms = TERMS) -> None:
    check_receipt(terms, receipt, PEERS[0].peer_id, MANIFEST, verify)


def acks(*ackers: Signed) -> Receipt:
    return Receipt(MANIFEST.round, statement_hash(UPDATE), tuple(mark_of(ack) for ack in ackers))


def test_a_receipt_needs_f_plus_one_acks_of_others_for_experts_and_replicas_for_psi() -> None:
    check(receipt_of(UPDATE, PEERS[:3]))
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        check(receipt_of(UPDATE, PEERS[:2]))
    halves = [ack_of(UPDATE, PEERS[1], range(0, PIECES, 2)), ack_of(UPDATE, PEERS[2], range(1, PIECES, 2))]
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        check(acks(*halves))
    check(receipt_of(UPDATE, PEERS))


def test_acks_of_strangers_do_not_count() -> None:
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        check(receipt_of(UPDATE, [PEERS[1], identity_of("x"), identity_of("y")]))


@pytest.mark.parametrize(
    ("receipt", "why"),
    [
        (acks(ack_of(UPDATE, PEERS[1]), ack_of(UPDATE, PEERS[1])), "twice"),
        (acks(ack_of(UPDATE, PEERS[1]), ack_of(UPDATE, PEERS[0])), "by its author"),
        (acks(ack_of(UPDATE, PEERS[1]), ack_of(update_of(FOUR, PEERS[0], note="x"), PEERS[2])), "wrong signature"),
        (msgspec.structs.replace(receipt_of(UPDATE, PEERS), round=1), "another round"),
        (acks(sign(PEERS[1], Ack(MANIFEST.run, 0, 2, statement_hash(UPDATE), bytes(9)))), "bitmap"),
        (acks(msgspec.structs.replace(ack_of(UPDATE, PEERS[1]), signature=bytes(64))), "wrong signature"),
    ],
)
def test_a_receipt_with_an_ack_that_is_not_valid_is_refused(receipt: Receipt, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        check(receipt)


def test_a_receipt_names_what_its_acks_signed() -> None:
    mark = receipt_of(UPDATE, PEERS).acks[0]
    ack = ack_of(UPDATE, next(peer for peer in PEERS if peer.peer_id == mark.peer))
    assert (mark.pieces, mark.signature) == (ack.body.pieces, ack.signature)
    with pytest.raises(RemoteProtocolError, match="no ack"):
        mark_of(alive_of(FOUR, PEERS[2]))


def test_a_receipt_has_no_ack_that_is_not_needed() -> None:
    first, *others = [mark_of(ack_of(UPDATE, peer)) for peer in PEERS[1:]]
    part = mark_of(ack_of(UPDATE, PEERS[1], [0]))
    tally = Tally(TERMS, MANIFEST, [first, *others])
    assert len(tally.fewest()) == TERMS.expert_acks == 2
    tally.add(part)
    assert tally.fewest() == tuple(sorted(others, key=lambda mark: mark.peer))
    assert Tally(TERMS, MANIFEST, [first, others[0], part]).is_enough is False


def test_a_receipt_lapses_when_its_ackers_are_no_longer_eligible() -> None:
    receipt = receipt_of(UPDATE, PEERS[:3])
    leave = item_of(sign(PEERS[1], Leave(FOUR.run.run_id, 0, 2, NO_DIGEST, 0)))
    after = follow(FOUR, [leave, *(item_of(alive_of(FOUR, peer)) for peer in PEERS)])
    assert Terms(after).expert_acks == 1
    check(receipt, Terms(after))
    ended = follow(after, [item_of(sign(PEERS[2], Leave(FOUR.run.run_id, 0, 3, NO_DIGEST, 0)))])
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        check(receipt, Terms(ended))


# --- cuts ------------------------------------------------------------------------------------------------------------

ITEMS = trained_items(FOUR, PEERS)
RECEIPTS = {receipt_hash(r): r for r in (receipt_of(update_of(FOUR, peer), PEERS) for peer in PEERS)}


def refuses_cut(items: list[Item], why: str, head: Head = FOUR) -> None:
    cut, chosen = cut_of(head, items)
    with pytest.raises(RemoteProtocolError, match=why):
        check_cut(Terms(head), cut, chosen, RECEIPTS)


def test_a_cut_of_receipted_updates_is_valid() -> None:
    cut, chosen = cut_of(FOUR, ITEMS)
    check_cut(TERMS, cut, chosen, RECEIPTS)


def test_the_items_of_a_cut_are_sorted_and_unique() -> None:
    cut, chosen = cut_of(FOUR, ITEMS)
    with pytest.raises(RemoteProtocolError, match="not sorted"):
        check_cut(TERMS, msgspec.structs.replace(cut, items=cut.items[::-1]), chosen[::-1], RECEIPTS)
    twice = (cut.items[0], *cut.items)
    with pytest.raises(RemoteProtocolError, match="not sorted"):
        check_cut(TERMS, msgspec.structs.replace(cut, items=twice), (chosen[0], *chosen), RECEIPTS)


def test_a_cut_has_one_item_for_a_slot() -> None:
    refuses_cut([item_of(alive_of(FOUR, PEERS[0], more)) for more in (True, False)], "two items for one slot")


def test_a_cut_has_one_proof_against_a_peer() -> None:
    two = [encode(update_of(FOUR, PEERS[1], note=note)) for note in ("", "x")]
    proofs = [sign(peer, Evidence(FOUR.run.run_id, 0, 2, *two)) for peer in (PEERS[0], PEERS[2])]
    refuses_cut([item_of(proof) for proof in proofs], "two items for one slot")


def test_an_update_in_a_cut_has_its_receipt() -> None:
    other = receipt_hash(receipt_of(update_of(FOUR, PEERS[1]), PEERS))
    entry = ITEMS[0].entry
    for receipt in (NO_DIGEST, other):
        item = Item(entry=CutItem(entry.kind, entry.peer, entry.statement, receipt), signed=ITEMS[0].signed)
        refuses_cut([item], "no receipt")


def test_an_update_in_a_cut_is_newer_than_its_peers_newest() -> None:
    after = follow(FOUR, ITEMS)
    refuses_cut(ITEMS[:1], "older than its peer's newest", after)


def test_the_kind_of_an_item_is_that_of_its_statement() -> None:
    alive = alive_of(FOUR, PEERS[0])
    entry = CutItem(ItemKind.CLAIM, PEERS[0].peer_id, statement_hash(alive), NO_DIGEST)
    refuses_cut([Item(entry=entry, signed=alive)], "wrong kind")


def test_a_late_manifest_without_receipt_is_no_sign_of_life() -> None:
    after = follow(FOUR, [item_of(alive_of(FOUR, peer)) for peer in PEERS])
    refuses_cut([item_of(update_of(FOUR, PEERS[0]))], "wrong kind", after)
    cut, chosen = cut_of(after, [item_of(update_of(after, PEERS[0]))])
    check_cut(Terms(after), cut, chosen, {})


def test_a_cut_is_for_its_round_only() -> None:
    cut, chosen = cut_of(genesis_of(PEERS), [])
    with pytest.raises(RemoteProtocolError, match="another round"):
        check_cut(TERMS, cut, chosen, {})
