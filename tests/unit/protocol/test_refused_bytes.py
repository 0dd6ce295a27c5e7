"""What does not parse, does not verify, or contradicts itself is refused, and says why."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.config import MergeConfig, RunConfig, TrainingConfig
from spes_p2p.crypto import verify
from spes_p2p.digests import digest
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Cut, Tenure
from spes_p2p.protocol.certificate import verify_certificate
from spes_p2p.protocol.codec import (
    decode_as,
    decode_certificate,
    decode_signed,
    decode_signed_run,
    encode,
    sign,
)
from spes_p2p.protocol.head import Terms, genesis_head, psi_digest
from spes_p2p.protocol.inbox import Inbox, round_of
from spes_p2p.protocol.messages import (
    Ack,
    BodyMessage,
    CutAnnouncement,
    CutMessage,
    Evidence,
    HandoverDone,
    Leave,
    Manifest,
    Message,
    Offer,
    Proposal,
    ProposalMessage,
    SignedRun,
    TipAsk,
    Want,
)
from spes_p2p.protocol.params import MAX_PEERS_REMEMBERED
from spes_p2p.protocol.receipts import check_receipt, mark_of
from spes_p2p.protocol.state import bytes_of
from spes_p2p.protocol.statements import Item, check_cut, check_statement, slot_of
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
    ack_of,
    alive_of,
    body_of,
    certificate_of,
    claim_of,
    cut_of,
    follow,
    genesis_of,
    identities,
    item_of,
    owned_head,
    receipt_of,
    trained_items,
    transition_of,
    update_of,
    vote_of,
)

PEERS = identities(4)
GENESIS = genesis_of(PEERS)
HEAD = owned_head(PEERS)
TERMS = Terms(HEAD)
RUN = HEAD.run.run_id
SENDER = PEERS[3].peer_id
CREATOR = next(peer for peer in PEERS if peer.peer_id == HEAD.run.manifest.created_by)
SIGNED_RUN = SignedRun(HEAD.run.manifest, CREATOR.sign("run", encode(HEAD.run.manifest)))
BODY = body_of(HEAD, transition_of(HEAD, trained_items(HEAD, PEERS)))


# --- kinds of messages -----------------------------------------------------------------------------------------------


def test_bytes_of_another_kind_of_message_are_refused_with_their_sender() -> None:
    alive, run = encode(alive_of(HEAD, PEERS[0])), encode(SIGNED_RUN)
    for decoder, data, name in ((decode_signed, run, "Signed"), (decode_certificate, alive, "Certificate")):
        with pytest.raises(RemoteProtocolError, match=f"malformed message: not a {name}") as caught:
            decoder(data, SENDER)
        assert caught.value.peer_id == SENDER
    with pytest.raises(RemoteProtocolError, match="not a SignedRun"):
        decode_signed_run(alive)
    assert decode_as(TipAsk, encode(TipAsk(0, 7))) == TipAsk(0, 7)


def test_a_run_manifest_is_its_creators() -> None:
    assert decode_signed_run(encode(SIGNED_RUN)) == SIGNED_RUN
    for wrong in (bytes(64), PEERS[0].sign("run", b""), CREATOR.sign("vote", encode(HEAD.run.manifest))):
        with pytest.raises(RemoteProtocolError, match="the run manifest's signature is wrong"):
            decode_signed_run(encode(SignedRun(HEAD.run.manifest, wrong)), SENDER)


def test_every_message_knows_its_round() -> None:
    cut = cut_of(HEAD, [])[0]
    announcement = sign(PEERS[0], CutAnnouncement(RUN, 0, 2, 0, digest("cut")))
    proposal = sign(PEERS[0], Proposal(RUN, 0, 2, 0, digest("body"), None))
    update = update_of(HEAD, PEERS[0])
    of_round_2: list[Message] = [
        alive_of(HEAD, PEERS[0]),
        receipt_of(update, PEERS),
        CutMessage(announcement, cut),
        ProposalMessage(proposal, BODY, b""),
        BodyMessage(BODY, b""),
        certificate_of(HEAD, BODY, PEERS),
        Offer(0, 2, ()),
        Want(0, 2, ()),
        cut,
    ]
    assert [round_of(message) for message in of_round_2] == [2] * 9
    of_none: list[Message] = [TipAsk(0, 2), HandoverDone(2, digest("blob")), SIGNED_RUN]
    assert [round_of(message) for message in of_none] == [-1] * 3


def test_peers_whose_questions_are_counted_are_bounded() -> None:
    inbox = Inbox()
    first, *rest = (PeerId(number.to_bytes(32, "big")) for number in range(MAX_PEERS_REMEMBERED + 1))
    assert inbox.may_ask(first, 0, 1_000)
    assert inbox.may_answer(first, 1, 0, 1_000)
    for peer in rest[:-1]:
        inbox.may_ask(peer, 0, 1_000)
        inbox.may_answer(peer, 1, 0, 1_000)
    assert not inbox.may_ask(first, 1, 1_000)
    assert not inbox.may_answer(first, 1, 1, 1_000)
    inbox.may_ask(rest[-1], 0, 1_000)
    inbox.may_answer(rest[-1], 1, 0, 1_000)
    assert inbox.may_ask(first, 1, 1_000)  # the counts began anew
    assert inbox.may_answer(first, 1, 1, 1_000)


# --- genesis and heads -----------------------------------------------------------------------------------------------


def test_founders_are_sorted_and_named_once() -> None:
    manifest, sizes = GENESIS.run.manifest, GENESIS.run.sizes
    for founders in (tuple(reversed(manifest.founders)), (*manifest.founders, manifest.founders[-1])):
        with pytest.raises(RemoteProtocolError, match="founders are not sorted"):
            genesis_head(msgspec.structs.replace(manifest, founders=founders), sizes)


def test_genesis_blobs_fit_the_configuration() -> None:
    manifest, sizes = GENESIS.run.manifest, GENESIS.run.sizes
    for change in ({"shards": manifest.shards[1:]}, {"parts": manifest.parts[1:]}):
        with pytest.raises(RemoteProtocolError, match="do not fit the configuration"):
            genesis_head(msgspec.structs.replace(manifest, **change), sizes)


def test_the_digest_of_psi_is_over_the_digests_of_its_parts() -> None:
    assert HEAD.psi_digest == psi_digest(HEAD.parts)
    assert psi_digest(HEAD.parts) != psi_digest(tuple(reversed(HEAD.parts)))
    assert BODY.psi == psi_digest(BODY.parts)


def test_a_run_without_members_has_no_leader() -> None:
    lone = owned_head(PEERS[:1])
    over = follow(lone, [item_of(sign(PEERS[0], Leave(lone.run.run_id, 0, 2, NO_DIGEST, 0)))])
    assert Terms(over).voters == ()
    with pytest.raises(LocalProtocolError, match="has no leader"):
        Terms(over).leader(0)


def test_the_merge_lists_of_a_certificate_match_their_root() -> None:
    merge = MergeConfig(alpha=0.1, interval_steps=10, warmup_steps=100)
    head = owned_head(PEERS, RunConfig(protocol=QUICK, training=TrainingConfig(inner_steps=((0, 10),), merge=merge)))
    body = body_of(head, transition_of(head, trained_items(head, PEERS)), merge_lists=b"lists")
    good = certificate_of(head, body, PEERS, b"lists")
    assert verify_certificate(Terms(head), good, verify).merge_root == body.merge_root
    with pytest.raises(RemoteProtocolError, match="do not match their root"):
        verify_certificate(Terms(head), msgspec.structs.replace(good, merge_lists=b"other"), verify)


def test_the_owner_in_a_state_is_named_by_key() -> None:
    assert bytes_of(Tenure(PEERS[0].peer_id, 1, 0)) == PEERS[0].peer_id
    with pytest.raises(RemoteProtocolError, match="names an owner by place"):
        bytes_of(Tenure(3, 1, 0))


# --- statements and cuts ---------------------------------------------------------------------------------------------


def test_a_vote_is_no_statement() -> None:
    vote = vote_of(TERMS, PEERS[0], Step.PREVOTE, digest("body"))
    for judge in (slot_of, lambda signed: check_statement(TERMS, signed, verify)):
        with pytest.raises(RemoteProtocolError, match="a vote is no statement"):
            judge(vote)


def test_a_receipt_is_of_the_round_of_its_update_and_its_acks_are_of_that_round_too() -> None:
    update = update_of(HEAD, PEERS[0])
    manifest = update.body
    assert isinstance(manifest, Manifest)
    good = receipt_of(update, PEERS)
    check_receipt(TERMS, good, PEERS[0].peer_id, manifest, verify)
    with pytest.raises(RemoteProtocolError, match="another round than its update"):
        check_receipt(TERMS, msgspec.structs.replace(good, round=3), PEERS[0].peer_id, manifest, verify)
    ack = ack_of(update, PEERS[1]).body
    assert isinstance(ack, Ack)
    for change in ({"round": 3}, {"epoch": 1}, {"run": digest("run")}):
        other = mark_of(sign(PEERS[1], msgspec.structs.replace(ack, **change)))
        with pytest.raises(RemoteProtocolError, match="wrong signature"):
            receipt = msgspec.structs.replace(good, acks=(other, *good.acks[1:]))
            check_receipt(TERMS, receipt, PEERS[0].peer_id, manifest, verify)


def test_a_cut_item_is_the_statement_it_names() -> None:
    items = [item_of(claim_of(HEAD, peer)) for peer in PEERS[:2]]
    cut, chosen = cut_of(HEAD, items)
    check_cut(TERMS, cut, chosen, {})
    swapped = (Item(entry=chosen[0].entry, signed=chosen[1].signed), chosen[1])
    with pytest.raises(RemoteProtocolError, match="names another statement"):
        check_cut(TERMS, cut, swapped, {})
    by_another = msgspec.structs.replace(chosen[0].entry, peer=PEERS[2].peer_id)
    forged = Cut(RUN, 0, 2, tuple(sorted((by_another, chosen[1].entry), key=lambda e: (e.kind, e.peer))))
    items_of_forged = tuple(
        Item(entry=entry, signed=chosen[0].signed if entry == by_another else chosen[1].signed)
        for entry in forged.items
    )
    with pytest.raises(RemoteProtocolError, match="names another statement"):
        check_cut(TERMS, forged, items_of_forged, {})


def test_an_update_item_has_a_manifest() -> None:
    claim = item_of(claim_of(HEAD, PEERS[0]))
    with pytest.raises(RemoteProtocolError, match="an update item without a manifest"):
        _ = Item(entry=msgspec.structs.replace(claim.entry, kind=ItemKind.UPDATE), signed=claim.signed).manifest


def test_evidence_in_a_cut_makes_its_author_no_less_silent() -> None:
    accuser, liar, *others = PEERS
    proof = [encode(update_of(HEAD, liar, note=note)) for note in "ab"]
    evidence = item_of(sign(accuser, Evidence(RUN, 0, 2, *proof)))
    after = follow(HEAD, [evidence, *(item_of(alive_of(HEAD, peer)) for peer in others)])
    assert {row.peer: row.last_item_round for row in after.state.roster} == {
        accuser.peer_id: 1,
        **{peer.peer_id: 2 for peer in others},
    }
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(alive_of(HEAD, accuser), evidence.signed)
    assert voter.round.cuts.missing([evidence], 0) == ["alive"]
