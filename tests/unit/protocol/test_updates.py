import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import bits, encode, pack_float, sign, statement_hash
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import Ack, Evidence, Manifest, Offer, Receipt, Ref, Refusal, Signed, Want
from spes_p2p.protocol.norms import Yardstick
from spes_p2p.protocol.receipts import mark_of
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind, RefKind, RefusalReason
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    ack_of,
    alive_of,
    claim_of,
    follow,
    genesis_of,
    identities,
    item_of,
    owned_head,
    receipt_of,
    trained_items,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
RESEND = HEAD.run.config.protocol.resend_ms


def checks(voter: OneVoter) -> list[fx.CheckPiece]:
    return [effect for effect in voter.effects if isinstance(effect, fx.CheckPiece)]


def answer_all(voter: OneVoter, reason: RefusalReason | None = None) -> None:
    for check in checks(voter):
        voter.round.local(fx.PieceChecked(manifest=check.manifest, piece=check.piece_index, reason=reason))
    voter.wait(1)


def sent(voter: OneVoter, kind: type) -> list[Signed]:
    found = {m.signature: m for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, kind)}
    return list(found.values())


def hears_update() -> tuple[OneVoter, Signed]:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.others[0])
    voter.hear(voter.others[0], update)
    return voter, update


# --- acknowledging ---------------------------------------------------------------------------------------------------


def test_an_acker_asks_for_all_experts_and_for_the_psi_pieces_within_reach() -> None:
    voter, update = hears_update()
    asked = {(check.piece.kind, check.piece.index) for check in checks(voter)}
    shards = {(PieceKind.EXPERT, shard) for shard in HEAD.state.shards_of(update.peer)}
    near = {
        (PieceKind.PSI, part)
        for part, order in enumerate(voter.terms.aggregators)
        if order.index(voter.me.peer_id) < voter.terms.replicas + 1
    }
    assert asked == shards | near
    voter.wait(RESEND)
    assert len(checks(voter)) == 4 + len(shards)


def test_an_ack_names_the_pieces_that_are_stored_and_goes_to_the_author() -> None:
    voter, update = hears_update()
    answer_all(voter)
    (ack,) = sent(voter, Ack)
    assert isinstance(ack.body, Ack)
    assert ack.body.manifest == statement_hash(update)
    assert bits(ack.body.pieces, 6) == {check.piece_index for check in checks(voter)}
    assert [to for to, m in voter.sent if m == ack] == [update.peer]


def test_a_refused_piece_gets_a_signed_reason_and_no_ack() -> None:
    voter, update = hears_update()
    answer_all(voter, RefusalReason.NOT_FINITE)
    assert sent(voter, Ack) == []
    assert {refusal.body.reason for refusal in sent(voter, Refusal)} == {RefusalReason.NOT_FINITE}
    assert {to for to, m in voter.sent if m in sent(voter, Refusal)} == {update.peer}


def test_a_piece_that_could_not_be_had_is_asked_for_again_and_not_refused() -> None:
    voter, _ = hears_update()
    first = len(checks(voter))
    answer_all(voter, RefusalReason.MISSING)
    assert sent(voter, Refusal) == []
    voter.wait(RESEND)
    assert len(checks(voter)) >= 2 * first


def test_an_update_from_a_base_row_that_never_was_is_refused() -> None:
    voter = OneVoter(HEAD, PEERS)
    manifest = update_of(HEAD, voter.others[0]).body
    assert isinstance(manifest, Manifest)
    last = msgspec.structs.replace(manifest.pieces[-1], base_row=bytes(32))
    voter.hear(
        voter.others[0], sign(voter.others[0], msgspec.structs.replace(manifest, pieces=(*manifest.pieces[:-1], last)))
    )
    voter.wait(1)
    assert [refusal.body.reason for refusal in sent(voter, Refusal)] == [RefusalReason.BASE_ROW]


def test_a_late_update_whose_base_row_is_not_known_here_is_neither_acked_nor_refused() -> None:
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    voter = OneVoter(after, PEERS)
    manifest = update_of(HEAD, voter.others[0]).body
    assert isinstance(manifest, Manifest)
    pieces = tuple(msgspec.structs.replace(piece, base_row=bytes(32)) for piece in manifest.pieces)
    late = sign(voter.others[0], msgspec.structs.replace(manifest, pieces=pieces))
    voter.round.late(voter.others[0].peer_id, late)
    voter.wait(2 * RESEND)
    assert {check.piece.kind for check in checks(voter)} == {PieceKind.PSI}
    assert sent(voter, Refusal) == []


def stretched(update: Signed, author: Identity, norm: float, steps: int = 10) -> Signed:
    """The update with another norm of every piece."""
    assert isinstance(update.body, Manifest)
    stated = pack_float(norm * norm)
    pieces = tuple(msgspec.structs.replace(piece, squared_norm=stated) for piece in update.body.pieces)
    return sign(author, msgspec.structs.replace(update.body, pieces=pieces, steps=steps))


def hears_norms(voter: OneVoter, *norms: float, steps: int = 10) -> None:
    for peer, norm in zip(voter.others, norms, strict=False):
        voter.hear(peer, stretched(update_of(HEAD, peer), peer, norm, steps))
    voter.wait(1)


def refused(voter: OneVoter) -> set[PeerId]:
    found = [(to, m.body) for to, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Refusal)]
    assert all(body.reason is RefusalReason.NORM_BOUND for _, body in found)
    return {to for to, _ in found}


def asked_of(voter: OneVoter) -> set[PeerId]:
    return {check.author for check in checks(voter)}


def test_an_absurd_norm_is_refused_unseen_once_others_of_the_round_are_held() -> None:
    voter = OneVoter(HEAD, PEERS)
    liar, honest = voter.others[:2]
    hears_norms(voter, 1e6)
    assert (asked_of(voter), refused(voter)) == (set(), set())
    voter.hear(honest, update_of(HEAD, honest))
    voter.wait(RESEND)
    assert (asked_of(voter), refused(voter)) == ({honest.peer_id}, {liar.peer_id})


def test_norms_that_have_grown_for_everybody_are_believed() -> None:
    voter = OneVoter(HEAD, PEERS)
    hears_norms(voter, 20.0, 25.0)
    assert asked_of(voter) == {peer.peer_id for peer in voter.others[:2]}
    assert refused(voter) == set()


def test_a_norm_beyond_the_bound_with_nobody_elses_to_compare_is_refused_after_the_grace() -> None:
    voter = OneVoter(HEAD, PEERS)
    hears_norms(voter, 20.0)
    voter.wait(HEAD.run.config.protocol.train_grace_ms)
    assert (asked_of(voter), refused(voter)) == (set(), {voter.others[0].peer_id})


@pytest.mark.parametrize(("wait_ms", "num_asked"), [(0, 0), (HEAD.run.config.protocol.train_grace_ms, 1)])
def test_without_a_past_an_update_waits_for_others_of_the_round_or_for_the_grace(wait_ms: int, num_asked: int) -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.updates._history.norms = Yardstick()
    hears_norms(voter, 1e6)
    voter.wait(wait_ms)
    assert len(asked_of(voter)) == num_asked


def test_without_a_past_the_round_itself_tells_what_is_absurd() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.updates._history.norms = Yardstick()
    hears_norms(voter, 1e6, 1.0)
    assert (asked_of(voter), refused(voter)) == ({voter.others[1].peer_id}, {voter.others[0].peer_id})


@pytest.mark.parametrize(("steps", "is_believed"), [(2, False), (10, True), (10**6, True)])
def test_a_peer_that_makes_more_steps_goes_further(steps: int, is_believed: bool) -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.updates._history.norms = Yardstick(psi=((2.0, 2),), experts=((1.0, 2),))
    hears_norms(voter, 14.0, steps=steps)  # 7 and 14 times those of two steps; ten steps may have 15 times
    assert bool(asked_of(voter)) == is_believed


def test_stated_steps_count_up_to_those_of_the_round() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.updates._history.norms = Yardstick(psi=((2.0, 2),), experts=((1.0, 2),))
    hears_norms(voter, 16.0, steps=10**6)
    assert asked_of(voter) == set()


def test_one_manifest_of_a_slot_is_acknowledged_and_the_second_is_evidence() -> None:
    voter, update = hears_update()
    other = update_of(HEAD, voter.others[0], note="other")
    voter.hear(voter.others[0], other)
    answer_all(voter)
    assert {ack.body.manifest for ack in sent(voter, Ack)} == {statement_hash(update)}
    assert len(sent(voter, Evidence)) == 1
    assert (ItemKind.EVIDENCE, update.peer, 0) in voter.round.updates.slots


def test_after_a_restart_no_other_manifest_of_the_slot_is_acknowledged() -> None:
    voter, _ = hears_update()
    answer_all(voter)
    again = OneVoter(HEAD, PEERS, voter.journal)
    again.hear(again.others[0], update_of(HEAD, again.others[0], note="other"))
    answer_all(again)
    assert sent(again, Ack) == []


# --- receipts --------------------------------------------------------------------------------------------------------


def own_update(voter: OneVoter) -> Signed:
    update = update_of(HEAD, voter.me)
    voter.hear_all(update)
    return update


def receipts(voter: OneVoter) -> list[Receipt]:
    return [message for _, message in voter.sent if isinstance(message, Receipt)]


def test_the_author_sends_the_receipt_once_every_piece_has_its_acks() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = own_update(voter)
    voter.hear(voter.others[0], ack_of(update, voter.others[0]))
    voter.hear(voter.others[1], ack_of(update, voter.others[1], [0, 1, 2]))
    assert receipts(voter) == []
    voter.hear(voter.others[1], ack_of(update, voter.others[1]))
    assert receipts(voter) == [receipt_of(update, voter.others[:2])] * 3


def test_acks_of_strangers_never_enter_a_receipt() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = own_update(voter)
    for number in range(200):
        stranger = identity_of(f"sybil {number}")
        voter.round.remote(stranger.peer_id, ack_of(update, stranger))
    assert voter.round.updates.by_hash[statement_hash(update)].acks == {}


def test_a_receipt_before_its_manifest_waits_for_it() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.others[0])
    voter.hear(voter.others[1], receipt := receipt_of(update, PEERS))
    (want,) = [message for _, message in voter.sent if isinstance(message, Want)]
    assert want.refs == (Ref(RefKind.STATEMENT, statement_hash(update), NO_DIGEST),)
    voter.hear(voter.others[1], update)
    assert voter.round.updates.by_hash[statement_hash(update)].receipt == receipt


def test_early_receipts_and_offers_of_one_peer_are_bounded() -> None:
    voter = OneVoter(HEAD, PEERS)
    for number in range(100):
        ack = ack_of(update_of(HEAD, voter.others[0]), voter.others[1])
        fake = Receipt(2, number.to_bytes(32, "little"), (mark_of(ack),))
        voter.hear(voter.others[0], fake)
    assert len(voter.round.updates._early_receipts) == 64
    for batch in range(3):
        refs = tuple(Ref(RefKind.STATEMENT, (batch * 4096 + n).to_bytes(32, "big"), NO_DIGEST) for n in range(1, 4096))
        voter.hear(voter.others[1], Offer(0, 2, refs))
    assert len(voter.context._wants) == 64 + 2048


def test_a_second_receipt_of_an_update_is_kept_only_if_a_cut_names_it() -> None:
    voter, update = hears_update()
    voter.hear(voter.others[0], receipt_of(update, PEERS))
    voter.hear(voter.others[0], receipt_of(update, PEERS[:3]))
    assert len(voter.round.updates.receipts) == 1


# --- asking and answering --------------------------------------------------------------------------------------------


def test_a_want_gets_every_object_once_and_no_more_than_a_number() -> None:
    voter, update = hears_update()
    ref = Ref(RefKind.STATEMENT, statement_hash(update), NO_DIGEST)
    unknown = tuple(Ref(RefKind.STATEMENT, number.to_bytes(32, "big"), NO_DIGEST) for number in range(64))
    asker = voter.others[1]
    for refs, num_answers in (((ref,) * 4096, 1), ((*unknown, ref), 0)):
        voter.sent.clear()
        voter.hear(asker, Want(0, 2, refs))
        assert voter.sent == [(asker.peer_id, update)] * num_answers


def test_a_refusal_by_a_stranger_is_not_shown() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = own_update(voter)
    for refuser, num_notes in ((identity_of("stranger"), 0), (voter.others[0], 1), (voter.others[0], 1)):
        body = Refusal(HEAD.run.run_id, 0, 2, statement_hash(update), 0, RefusalReason.NORM_BOUND)
        voter.hear(refuser, sign(refuser, body))
        notes = [effect.text for effect in voter.effects if isinstance(effect, fx.Notify)]
        assert notes == ["a peer refused this node's update of round 2: norm bound"] * num_notes


def test_a_refusal_counts_once_more_members_than_may_be_faulty_give_the_same_reason() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = own_update(voter)
    first, second, third = voter.others[:3]
    norm, schema = RefusalReason.NORM_BOUND, RefusalReason.SCHEMA
    expected = fx.UpdateRefused(round=2, reason=norm)
    for refuser, reason, num_told in ((first, norm, 0), (second, schema, 0), (first, norm, 0), (third, norm, 1)):
        voter.hear(refuser, sign(refuser, Refusal(HEAD.run.run_id, 0, 2, statement_hash(update), 0, reason)))
        assert [effect for effect in voter.effects if isinstance(effect, fx.UpdateRefused)] == [expected] * num_told


# --- from round to round ---------------------------------------------------------------------------------------------


def test_what_was_not_in_the_cut_is_carried_with_acks_checks_and_receipt() -> None:
    voter, update = hears_update()
    answer_all(voter)
    voter.hear(voter.others[0], receipt_of(update, PEERS))
    held = voter.round.updates.by_hash[statement_hash(update)]
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    later = OneVoter(after, PEERS)
    later.round.carry(held)
    later.wait(1)
    mine = later.round.updates.by_hash[statement_hash(update)]
    assert mine.receipt == held.receipt
    assert mine.acked == held.acked
    assert checks(later) == []


def test_a_receipt_that_lapsed_is_dropped_and_the_update_is_checked_anew() -> None:
    voter, update = hears_update()
    voter.hear(voter.others[0], receipt_of(update, PEERS))
    held = voter.round.updates.by_hash[statement_hash(update)]
    assert held.receipt is not None
    held.receipt = Receipt(2, held.hash, held.receipt.acks[:1])
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    later = OneVoter(after, PEERS)
    if later.me.peer_id == update.peer:  # an author makes a receipt of the acks that it has
        after = follow(after, [item_of(alive_of(after, peer)) for peer in PEERS])
        later = OneVoter(after, PEERS)
    assert later.me.peer_id != update.peer
    later.round.carry(held)
    assert later.round.updates.by_hash[held.hash].receipt is None


def test_an_update_that_was_accepted_or_expired_is_not_carried() -> None:
    voter, update = hears_update()
    held = voter.round.updates.by_hash[statement_hash(update)]
    after = follow(HEAD, trained_items(HEAD, PEERS))
    accepted = OneVoter(after, PEERS)
    accepted.round.carry(held)
    assert accepted.round.updates.slots == {}
    far = follow(follow(follow(HEAD, []), []), [])
    with pytest.raises(RemoteProtocolError, match="in round 5"):
        OneVoter(far, PEERS).round.carry(held)


def test_alive_no_more_supersedes_alive_more_and_never_the_other_way() -> None:
    voter = OneVoter(HEAD, PEERS)
    peer = voter.others[0]
    voter.hear_all(alive_of(HEAD, peer, more=True))
    assert not voter.round.updates.is_in(peer.peer_id)
    voter.hear_all(alive_of(HEAD, peer, more=False))
    assert voter.round.updates.is_in(peer.peer_id)
    voter.hear_all(alive_of(HEAD, peer, more=True))
    assert voter.round.updates.is_in(peer.peer_id)


def test_training_that_ends_twice_makes_one_update() -> None:
    voter = OneVoter(HEAD, PEERS)
    pieces = update_of(HEAD, voter.me).body.pieces
    for tokens in (100, 200):
        trained = fx.Trained(round=2, tokens=tokens, steps=1, loss_micronats=1, pieces=pieces)
        voter.round.local(trained)
    voter.wait(1)
    assert [m.body.tokens for m in sent(voter, Manifest)] == [100]


def test_a_late_result_is_published_for_its_own_round_and_only_once() -> None:
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    voter = OneVoter(after, PEERS)
    pieces = update_of(HEAD, voter.me).body.pieces
    trained = fx.Trained(round=2, tokens=100, steps=1, loss_micronats=1, pieces=pieces)
    voter.round.local(trained)
    voter.round.local(trained)
    voter.wait(1)
    (late,) = sent(voter, Manifest)
    assert (late.body.round, late.body.prev) == (2, HEAD.hash)
    assert encode(late) in voter.journal.values()


def test_a_result_of_a_round_too_long_ago_is_not_published() -> None:
    far = HEAD
    for _ in range(3):
        far = follow(far, [item_of(alive_of(far, peer)) for peer in PEERS])
    voter = OneVoter(far, PEERS)
    pieces = update_of(HEAD, voter.me).body.pieces
    voter.round.local(fx.Trained(round=2, tokens=100, steps=1, loss_micronats=1, pieces=pieces))
    voter.wait(1)
    assert sent(voter, Manifest) == []


def test_a_statement_that_was_served_and_comes_again_is_kept_only_if_a_cut_names_it() -> None:
    voter = OneVoter(HEAD, PEERS)  # after a restart too: what was served follows from the certificates
    claim = claim_of(genesis_of(PEERS), voter.others[0])
    slot, identity = (ItemKind.CLAIM, claim.peer, 0), statement_hash(claim)
    voter.hear(voter.others[0], claim)
    assert (slot in voter.round.updates.slots, identity in voter.round.updates.by_hash) == (False, False)
    voter.cut([item_of(claim)])
    voter.hear(voter.others[0], claim)
    assert (slot in voter.round.updates.slots, identity in voter.round.updates.by_hash) == (False, True)


def test_what_was_served_is_forgotten_once_no_cut_may_name_it() -> None:
    claim = claim_of(genesis_of(PEERS), PEERS[0])
    head = follow(genesis_of(PEERS), [item_of(claim)])
    for number in range(1, 5):
        assert (statement_hash(claim) in Terms(head).served) is (number <= 3)
        head = follow(head, [item_of(alive_of(head, PEERS[0]))])
