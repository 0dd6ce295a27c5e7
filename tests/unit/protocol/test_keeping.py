"""What is kept of statements, proofs, rows and norms, and for how long; views and votes that are not."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.crypto import Identity
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Cut, CutItem
from spes_p2p.protocol.codec import body_hash, encode, pack_float, sign, statement_hash
from spes_p2p.protocol.history import Held, History
from spes_p2p.protocol.messages import (
    BodyMessage,
    Evidence,
    Manifest,
    Proposal,
    ProposalMessage,
    QuorumCertificate,
    Receipt,
    Ref,
    Refusal,
    Signed,
    ViewChange,
)
from spes_p2p.protocol.norms import Yardstick
from spes_p2p.protocol.params import MAX_VIEWS_AHEAD
from spes_p2p.protocol.progress import progress_of
from spes_p2p.protocol.state import ShardRow
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind, RefKind, RefusalReason, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    ack_of,
    alive_of,
    body_of,
    claim_of,
    follow,
    identities,
    item_of,
    join_of,
    owned_head,
    receipt_of,
    transition_of,
    update_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
RUN = HEAD.run.run_id
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
BODY = body_of(HEAD, transition_of(HEAD, ALIVE))


def held_of(signed: Signed) -> Held:
    return Held(signed=signed, hash=statement_hash(signed), held_at_ms=0)


def proof_of(liar: Identity) -> Evidence:
    first, second = (encode(update_of(HEAD, liar, note=note, shards=())) for note in "ab")
    return Evidence(RUN, 0, 2, first, second)


# --- from round to round ---------------------------------------------------------------------------------------------


def test_proofs_are_remembered_up_to_a_number() -> None:
    history = History()
    liars = [identity_of(f"liar {number}") for number in range(65)]
    for liar in liars:
        history.keep_proof(proof_of(liar))
    assert set(history.proofs) == {liar.peer_id for liar in liars[:64]}
    newer = msgspec.structs.replace(proof_of(liars[0]), round=9)
    history.keep_proof(newer)
    assert history.proofs[liars[0].peer_id].round == 9


def test_only_updates_feed_the_yardstick() -> None:
    history = History()
    history.remember(held_of(alive_of(HEAD, PEERS[0])))
    assert history.norms == Yardstick()
    history.remember(held_of(update_of(HEAD, PEERS[0])))
    assert history.norms == Yardstick(psi=((2.0, 10),), experts=((1.0, 10),) * 2)


def test_base_rows_are_known_for_as_long_as_a_late_update_may_name_them() -> None:
    history = History()

    def rows(number: int) -> tuple[ShardRow, ...]:
        return (ShardRow(0, HEAD.state.shards[0].blobs), ShardRow(1, ()) if number < 1 else ShardRow(number + 1, ()))

    for number in range(4):
        history.enter_rows(rows(number), number)
        known = {row.shard for row in history.rows.values()}
        assert known == {0} | {max(1, earlier + 1) for earlier in range(max(0, number - 2), number + 1)}


def test_the_yardstick_forgets_the_oldest() -> None:
    manifest = update_of(HEAD, PEERS[0]).body
    assert isinstance(manifest, Manifest)
    yardstick = Yardstick(psi=((9.0, 1),)).extended([manifest] * 64)
    assert yardstick.psi == ((2.0, 10),) * 64


def test_an_expert_beyond_the_bound_is_named_by_its_place() -> None:
    manifest = update_of(HEAD, PEERS[0]).body
    assert isinstance(manifest, Manifest)
    place = next(number for number, piece in enumerate(manifest.pieces) if piece.kind is PieceKind.EXPERT)
    pieces = list(manifest.pieces)
    pieces[place] = msgspec.structs.replace(pieces[place], squared_norm=pack_float(16.0))
    absurd = msgspec.structs.replace(manifest, pieces=tuple(pieces))
    yardstick = Yardstick().extended([manifest])
    assert yardstick.absurd_piece(absurd, bound=3.0, most_steps=10) == place
    assert yardstick.absurd_piece(absurd, bound=4.0, most_steps=10) is None
    assert Yardstick().absurd_piece(absurd, bound=3.0, most_steps=10) is None


# --- statements ------------------------------------------------------------------------------------------------------


def test_joins_of_strangers_are_kept_up_to_a_number_and_those_of_members_always() -> None:
    voter = OneVoter(HEAD, PEERS)
    strangers = [identity_of(f"stranger {number}") for number in range(65)]
    for stranger in strangers:
        voter.round.remote(stranger.peer_id, join_of(HEAD, stranger))
    kept = [peer for kind, peer, _ in voter.round.updates.slots if kind is ItemKind.JOIN]
    assert kept == [stranger.peer_id for stranger in strangers[:64]]
    voter.round.remote(strangers[0].peer_id, join_of(HEAD, strangers[0], capacity=7))
    voter.hear_all(join_of(HEAD, PEERS[0]))
    assert len(voter.round.updates.slots) == 65


def test_a_join_too_many_is_kept_beside_the_others_if_a_cut_names_it() -> None:
    voter = OneVoter(HEAD, PEERS)
    strangers = [identity_of(f"stranger {number}") for number in range(65)]
    for stranger in strangers[:64]:
        voter.round.remote(stranger.peer_id, join_of(HEAD, stranger))
    last = join_of(HEAD, strangers[64])
    entry = CutItem(ItemKind.JOIN, last.peer, statement_hash(last), NO_DIGEST)
    voter.round.cuts.learn(Cut(HEAD.run.run_id, HEAD.epoch, 2, (entry,)), [voter.others[0].peer_id])
    voter.round.remote(last.peer, last)
    (cut,) = voter.round.cuts.known.values()
    voter.round.cuts.resolve(cut)
    assert [item.signed for item in cut.items or ()] == [last]
    assert (ItemKind.JOIN, last.peer, 0) not in voter.round.updates.slots


@pytest.mark.parametrize(("num_named", "missing"), [(64, []), (63, ["join"])])
def test_a_cut_with_as_many_joins_as_a_leader_keeps_need_not_name_others(num_named: int, missing: list[str]) -> None:
    voter = OneVoter(HEAD, PEERS)
    *named, mine = (identity_of(f"stranger {number}") for number in range(num_named + 1))
    voter.round.remote(mine.peer_id, join_of(HEAD, mine))
    items = [item_of(join_of(HEAD, stranger)) for stranger in named]
    assert voter.round.cuts.missing(items, before_ms=voter.context.now_ms) == missing


def test_a_second_manifest_that_a_cut_names_is_kept_beside_the_first_and_not_acknowledged() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    first, second = update_of(HEAD, author), update_of(HEAD, author, note="second")
    voter.hear(author, first)
    voter.context.want(Ref(RefKind.STATEMENT, statement_hash(second), NO_DIGEST), [author.peer_id])
    num_checks = sum(isinstance(effect, fx.CheckPiece) for effect in voter.effects)
    voter.hear(author, second)
    updates = voter.round.updates
    assert updates.slots[ItemKind.UPDATE, author.peer_id, 2].signed == first
    assert updates.by_hash[statement_hash(second)].signed == second
    assert sum(isinstance(effect, fx.CheckPiece) for effect in voter.effects) == num_checks


def test_an_early_receipt_that_turns_out_wrong_is_told_and_the_manifest_counts() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    update = update_of(HEAD, author)
    few = Receipt(2, statement_hash(update), receipt_of(update, PEERS).acks[:1])
    voter.hear(voter.others[1], few)
    voter.hear(author, update)
    held = voter.round.updates.by_hash[statement_hash(update)]
    assert held.receipt is None
    notes = [effect.text for effect in voter.effects if isinstance(effect, fx.Notify)]
    assert notes == ["dropped a receipt that came before its manifest: the receipt lacks acks"]


def test_a_receipt_is_taken_once_and_for_an_update_that_is_held() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.others[0])
    assert not voter.round.updates.add_receipt(receipt_of(update, PEERS))
    voter.hear_all(update)
    assert voter.round.updates.add_receipt(receipt_of(update, PEERS))
    assert not voter.round.updates.add_receipt(receipt_of(update, PEERS))


def test_acks_after_the_receipt_change_nothing() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.me)
    voter.hear_all(update)
    receipt = receipt_of(update, voter.others[:2])
    for peer in voter.others[:2]:
        voter.hear(peer, ack_of(update, peer))
    held = voter.round.updates.slots[ItemKind.UPDATE, voter.me.peer_id, 2]
    assert held.receipt == receipt
    for peer in voter.others:
        voter.hear(peer, ack_of(update, peer))
    assert held.receipt == receipt


def test_acks_of_an_own_update_that_was_carried_with_its_receipt_are_kept() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.me)
    voter.hear_all(update)
    for peer in voter.others[:2]:
        voter.hear(peer, ack_of(update, peer))
    held = voter.round.updates.slots[ItemKind.UPDATE, voter.me.peer_id, 2]
    later = OneVoter(follow(HEAD, ALIVE), PEERS, me=voter.me)
    later.round.carry(held)
    third = voter.others[2]
    later.round.late(third.peer_id, ack_of(update, third))
    mine = later.round.updates.slots[ItemKind.UPDATE, voter.me.peer_id, 2]
    assert mine.receipt == held.receipt
    assert set(mine.acks) == {peer.peer_id for peer in voter.others}


def test_a_check_of_an_update_that_is_not_held_is_dropped() -> None:
    voter = OneVoter(HEAD, PEERS)
    claim = claim_of(HEAD, voter.others[0])
    voter.hear_all(claim)
    for identity in (digest("unknown"), statement_hash(claim)):
        voter.round.local(fx.PieceChecked(manifest=identity, piece=0, reason=None))
    voter.wait(1)
    assert voter.sent == []


def test_a_member_that_does_not_acknowledge_refuses_nothing_and_spreads_experts_unchecked() -> None:
    x = identity_of("x")
    head = follow(HEAD, [*ALIVE, item_of(join_of(HEAD, x))])
    for stretch, num_fetched in ((1.0, 2), (1e6, 0)):
        voter = OneVoter(head, PEERS, me=x)
        manifest = update_of(head, voter.others[0]).body
        assert isinstance(manifest, Manifest)
        pieces = tuple(msgspec.structs.replace(p, squared_norm=pack_float(stretch**2)) for p in manifest.pieces)
        voter.hear(voter.others[0], sign(voter.others[0], msgspec.structs.replace(manifest, pieces=pieces)))
        voter.wait(QUICK.train_grace_ms)
        fetched = [effect for effect in voter.effects if isinstance(effect, fx.FetchBlob)]
        assert [effect.blob for effect in fetched] == [p.blob for p in pieces[4:]][:num_fetched]
        assert not any(isinstance(effect, fx.CheckPiece) for effect in voter.effects)
        assert not any(isinstance(m, Signed) and isinstance(m.body, Refusal) for _, m in voter.sent)


def test_an_absurd_norm_is_refused_once() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    manifest = update_of(HEAD, author).body
    assert isinstance(manifest, Manifest)
    pieces = tuple(msgspec.structs.replace(piece, squared_norm=pack_float(1e12)) for piece in manifest.pieces)
    voter.hear(author, sign(author, msgspec.structs.replace(manifest, pieces=pieces)))
    voter.wait(QUICK.train_grace_ms + 5 * QUICK.resend_ms)
    refusals = {m.signature: m.body for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Refusal)}
    assert [body.reason for body in refusals.values() if isinstance(body, Refusal)] == [RefusalReason.NORM_BOUND]


# --- views, proposals and quorum certificates ------------------------------------------------------------------------


def settled() -> OneVoter:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in ALIVE))
    return voter


def proposal(voter: OneVoter, leader: Identity, **changes: object) -> ProposalMessage:
    body = msgspec.structs.replace(Proposal(RUN, 0, 2, 0, body_hash(BODY), None), **changes)
    return ProposalMessage(sign(leader, body), BODY, b"")


def test_a_proposal_is_its_leaders_of_this_round_and_with_the_body_it_names() -> None:
    voter = settled()
    leader, other = voter.leaders[:2]
    bare = ProposalMessage(vote_of(voter.terms, leader, Step.PREVOTE, body_hash(BODY)), BODY, b"")
    for message, why in (
        (proposal(voter, other), "does not lead its view"),
        (bare, "does not lead its view"),
        (proposal(voter, leader, round=3), "another round"),
        (proposal(voter, leader, epoch=1), "another round"),
        (proposal(voter, leader, body=digest("other")), "another body than it names"),
    ):
        with pytest.raises(RemoteProtocolError, match=why):
            voter.hear(leader, message)
    assert voter.round.voting.proposals == {}


def test_proposals_far_ahead_are_not_kept() -> None:
    voter = settled()
    for view in (MAX_VIEWS_AHEAD, MAX_VIEWS_AHEAD + 4):
        voter.hear(voter.others[0], proposal(voter, voter.leaders[view % 4], view=view))
    assert list(voter.round.voting.proposals) == [MAX_VIEWS_AHEAD]


def test_a_view_change_is_a_voters() -> None:
    voter, x = settled(), identity_of("x")
    for signed in (sign(x, ViewChange(RUN, 0, 2, 1, None)), alive_of(HEAD, voter.others[0])):
        with pytest.raises(RemoteProtocolError, match="a view change of a peer that does not vote"):
            voter.round.voting.add_wish(signed)
    assert voter.round.voting.wishes == {}


def test_view_changes_of_one_voter_are_kept_for_others_up_to_a_number() -> None:
    voter = settled()
    peer = voter.others[0]
    for view in range(1, 301):
        voter.hear(peer, sign(peer, ViewChange(RUN, 0, 2, view, None)))
    assert len(voter.round.voting.log) == 256
    assert voter.round.voting.wishes[peer.peer_id].body.view == 300


def test_a_quorum_that_is_split_over_bodies_decides_nothing() -> None:
    voter = settled()
    voter.propose(voter.quiet_body(ALIVE))
    a, b, c = voter.others
    for peer, body in ((a, body_hash(BODY)), (b, digest("other")), (c, body_hash(BODY))):
        voter.hear(peer, vote_of(voter.terms, peer, Step.PRECOMMIT, body))
    assert voter.round.voting.decided() is None


def test_a_quorum_for_a_body_that_is_not_here_decides_once_it_is() -> None:
    voter = settled()
    for peer in voter.others:
        voter.hear(peer, vote_of(voter.terms, peer, Step.PRECOMMIT, body_hash(BODY)))
    assert voter.round.voting.decided() is None
    voter.hear(voter.others[0], BodyMessage(BODY, b""))
    certificate = voter.round.voting.decided()
    assert certificate is not None
    assert (certificate.body, certificate.view) == (BODY, 0)


def test_a_forged_quorum_certificate_in_a_view_change_is_refused_with_it() -> None:
    voter = settled()
    peer = voter.others[0]
    forged: QuorumCertificate = msgspec.structs.replace(voter.qc_of(body_hash(BODY), 0), signatures=(bytes(64),) * 3)
    with pytest.raises(RemoteProtocolError, match="wrong signature"):
        voter.hear(peer, sign(peer, ViewChange(RUN, 0, 2, 1, forged)))
    assert (voter.round.voting.qc, voter.round.voting.wishes) == (None, {})


def test_a_view_that_was_asked_for_is_not_forgotten_by_a_restart() -> None:
    voter = settled()
    voter.others_ask_for_view(3, 2)
    assert (voter.asked_views(), voter.round.voting.view) == ([3], 3)
    again = OneVoter(HEAD, PEERS, voter.journal)
    assert (again.asked_views(), again.round.voting.view) == ([3], 3)
    again.others_ask_for_view(2, 3)
    again.wait(100)
    assert again.asked_views() == [3]


def test_the_highest_quorum_certificate_survives_a_restart_and_its_body_is_asked_for() -> None:
    voter = settled()
    qc = voter.qc_of(body_hash(BODY), 0)
    voter.others_ask_for_view(1, 1, qc)
    ref = Ref(RefKind.BODY, body_hash(BODY), NO_DIGEST)
    assert (voter.round.voting.qc, voter.context.is_wanted(ref)) == (qc, True)
    again = OneVoter(HEAD, PEERS, voter.journal)
    assert again.round.voting.qc == qc


def test_a_member_without_a_vote_follows_views_and_quorums_and_signs_nothing() -> None:
    x = identity_of("x")
    head = follow(HEAD, [*ALIVE, item_of(join_of(HEAD, x))])
    voter = OneVoter(head, PEERS, me=x)
    for peer in voter.leaders[:3]:
        voter.hear(peer, sign(peer, ViewChange(RUN, 0, 3, 1, None)))
        voter.hear(peer, vote_of(voter.terms, peer, Step.PREVOTE, digest("body"), view=1, held=True))
    voting = voter.round.voting
    assert voting.view == 1
    assert voting.qc is not None
    assert (voting.qc.view, voting.qc.body) == (1, digest("body"))
    assert voter.round.voting.deadline_ms() is None
    assert voter.asked_views() == voter.votes(Step.PREVOTE, 1) == voter.votes(Step.PRECOMMIT, 1) == []


def test_before_view_0_a_peer_waits_for_updates_of_the_others() -> None:
    voter = OneVoter(HEAD, PEERS)
    progress = progress_of(voter.round, False, False, 7)
    assert (progress.phase, progress.waiting_for) == ("acknowledge", "updates of the other members")
    assert (progress.view, progress.leader, progress.time_left_ms) == (0, voter.leaders[0].peer_id, None)
