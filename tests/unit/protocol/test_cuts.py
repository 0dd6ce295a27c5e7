"""When view 0 begins, which cuts are taken, and what a cut must name."""

from __future__ import annotations

import msgspec
import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.codec import cut_hash, receipt_hash, sign, statement_hash
from spes_p2p.protocol.messages import CutAnnouncement, CutMessage, Proposal, Receipt, Ref, Signed, Want
from spes_p2p.protocol.params import MAX_VIEWS_AHEAD
from spes_p2p.protocol.receipts import mark_of
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, Step
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    QUICK,
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
HEAD = owned_head(PEERS)
RUN = HEAD.run.run_id
ALIVE = [item_of(alive_of(HEAD, peer)) for peer in PEERS]
TRAINED = fx.Trained(round=2, tokens=1, steps=1, loss_micronats=1, pieces=())


def announced(voter: OneVoter, cut: Cut, view: int = 0, changes: dict[str, object] | None = None) -> CutMessage:
    body = CutAnnouncement(RUN, 0, 2, view, cut_hash(cut))
    return CutMessage(sign(voter.leaders[view % 4], msgspec.structs.replace(body, **(changes or {}))), cut)


def began_at_ms(voter: OneVoter, limit_ms: int = 60_000) -> int:
    while voter.round.voting.view < 0 and voter.context.now_ms < limit_ms:
        voter.wait(100)
    return voter.context.now_ms


# --- view 0 ----------------------------------------------------------------------------------------------------------


def test_view_0_begins_when_all_live_members_are_in() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in ALIVE[:3]))
    assert voter.round.voting.view == -1
    voter.hear_all(ALIVE[3].signed)
    assert voter.round.voting.view == 0


def test_view_0_begins_the_grace_after_the_own_training_ended() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.wait(2_000)
    voter.round.local(TRAINED)
    assert began_at_ms(voter) == 2_000 + QUICK.train_grace_ms


def test_view_0_begins_the_grace_after_half_of_the_manifests_if_the_own_training_has_ended() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.wait(1_000)
    voter.hear_all(*(update_of(HEAD, peer) for peer in voter.others[:2]))
    voter.wait(3_000)
    voter.round.local(TRAINED)
    assert began_at_ms(voter) == 1_000 + QUICK.train_grace_ms


def test_view_0_does_not_begin_before_the_own_training_has_ended() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.training = True
    voter.hear_all(*(update_of(HEAD, peer) for peer in voter.others[:2]))
    voter.wait(2 * QUICK.train_grace_ms)
    assert voter.round.voting.view == -1
    voter.round.local(TRAINED)
    voter.wait(100)
    assert voter.round.voting.view == 0


def test_a_trainer_that_never_answers_holds_view_0_up_until_round_max_and_the_grace() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.round.training = True
    assert began_at_ms(voter) == QUICK.round_max_ms + QUICK.train_grace_ms


def test_for_a_peer_that_could_not_train_view_0_begins_at_round_max_or_the_grace_after_half() -> None:
    assert began_at_ms(OneVoter(HEAD, PEERS)) == QUICK.round_max_ms
    voter = OneVoter(HEAD, PEERS)
    voter.wait(1_000)
    voter.hear_all(*(update_of(HEAD, peer) for peer in voter.others[:2]))
    assert began_at_ms(voter) == 1_000 + QUICK.train_grace_ms


def test_with_no_live_member_a_round_lasts_round_max() -> None:
    nobody = follow(HEAD, [])
    voter = OneVoter(nobody, PEERS)
    voter.hear_all(*(alive_of(nobody, peer) for peer in PEERS))
    assert voter.terms.live == frozenset()
    assert began_at_ms(voter) == QUICK.round_max_ms


def test_in_round_1_a_claim_is_what_brings_a_member_in() -> None:
    genesis = genesis_of(PEERS)
    voter = OneVoter(genesis, PEERS)
    voter.hear_all(*(alive_of(genesis, peer) for peer in PEERS), *(claim_of(genesis, peer) for peer in PEERS[:3]))
    assert voter.round.voting.view == -1
    voter.hear_all(claim_of(genesis, PEERS[3]))
    assert voter.round.voting.view == 0


# --- cuts of leaders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cut": digest("other")}, "its announcement does not name"),
        ({"round": 3}, "another round"),
        ({"epoch": 1}, "another round"),
        ({"run": digest("run")}, "another round"),
        ({"view": 1}, "does not lead view 1"),
    ],
)
def test_a_cut_is_its_leaders_and_of_this_round(changes: dict[str, object], why: str) -> None:
    voter = OneVoter(HEAD, PEERS)
    cut = cut_of(HEAD, ALIVE)[0]
    with pytest.raises(RemoteProtocolError, match=why):
        voter.hear(voter.others[0], announced(voter, cut, changes=changes))
    assert voter.round.cuts.known == {}


def test_a_cut_that_another_statement_claims_to_announce_is_refused() -> None:
    voter = OneVoter(HEAD, PEERS)
    leader = voter.leaders[0]
    proposal = sign(leader, Proposal(RUN, 0, 2, 0, digest("body"), None))
    with pytest.raises(RemoteProtocolError, match="its announcement does not name"):
        voter.hear(leader, CutMessage(proposal, cut_of(HEAD, ALIVE)[0]))


def test_cuts_far_ahead_are_not_kept() -> None:
    voter = OneVoter(HEAD, PEERS)
    cut = cut_of(HEAD, ALIVE)[0]
    for view in (MAX_VIEWS_AHEAD - 1, MAX_VIEWS_AHEAD, 2**40):
        voter.hear(voter.others[0], announced(voter, cut, view))
    assert sorted(voter.round.cuts.announced) == [MAX_VIEWS_AHEAD - 1]


def test_a_cut_announced_again_counts_from_its_first_arrival() -> None:
    voter = OneVoter(HEAD, PEERS)
    cut = cut_of(HEAD, ALIVE)[0]
    voter.hear(voter.leaders[0], announced(voter, cut))
    voter.wait(500)
    voter.hear(voter.others[1], announced(voter, cut))
    assert voter.round.cuts.announced_at_ms == {0: 0}
    known = voter.round.cuts.known[cut_hash(cut)]
    assert known.sources == [voter.leaders[0].peer_id, voter.others[1].peer_id]


def test_what_a_cut_names_and_is_not_here_is_asked_for_and_then_the_cut_is_complete() -> None:
    voter = OneVoter(HEAD, PEERS)
    items = trained_items(HEAD, PEERS)
    voter.cut(items)
    (known,) = voter.round.cuts.known.values()
    refs = {ref for _, m in voter.sent if isinstance(m, Want) for ref in m.refs}
    assert refs == {Ref(RefKind.STATEMENT, item.entry.statement, NO_DIGEST) for item in items}
    voter.sent.clear()
    voter.hear_all(*(item.signed for item in items))
    voter.wait(1)
    refs = {ref for _, m in voter.sent if isinstance(m, Want) for ref in m.refs}
    assert refs == {Ref(RefKind.RECEIPT, item.entry.receipt, item.entry.statement) for item in items}
    assert known.items is None
    for item in items:
        voter.hear(voter.others[0], receipt_of(item.signed, PEERS))
    assert known.items is not None
    assert [item.signed for item in known.items] == [item.signed for item in cut_of(HEAD, items)[1]]


def test_a_receipt_that_a_cut_names_is_taken_although_another_is_here() -> None:
    voter = OneVoter(HEAD, PEERS)
    items = trained_items(HEAD, PEERS)
    voter.hear_all(*(item.signed for item in items))
    for item in items:
        least = [peer for peer in PEERS if peer.peer_id != item.signed.peer][:2]
        voter.round.updates.add_receipt(receipt_of(item.signed, least))
    voter.cut(items)
    (known,) = voter.round.cuts.known.values()
    assert known.items is None
    for item in items:
        voter.hear(voter.others[0], receipt_of(item.signed, PEERS))
        held = voter.round.updates.by_hash[item.entry.statement]
        assert held.receipt is not None
        assert len(held.receipt.acks) == 2  # the first one stays this peer's own
    assert known.items is not None


def test_a_cut_is_taken_from_whoever_was_asked_and_from_nobody_else() -> None:
    voter = OneVoter(HEAD, PEERS)
    cut = cut_of(HEAD, ALIVE)[0]
    voter.hear(voter.others[0], cut)
    assert voter.round.cuts.known == {}
    voter.context.want(Ref(RefKind.CUT, cut_hash(cut), NO_DIGEST), [voter.others[0].peer_id])
    voter.hear(voter.others[0], cut)
    assert list(voter.round.cuts.known) == [cut_hash(cut)]


# --- what a cut names ------------------------------------------------------------------------------------------------


def kinds(cut: Cut) -> dict[tuple[ItemKind, bytes], bytes]:
    return {(entry.kind, entry.peer): entry.receipt for entry in cut.items}


def test_a_cut_names_everything_that_is_held_and_each_member_as_alive_once() -> None:
    voter = OneVoter(HEAD, PEERS)
    receipted, bare, alive, silent = PEERS
    x = identity_of("x")
    updates = [update_of(HEAD, receipted), update_of(HEAD, bare)]
    voter.hear_all(*updates, *(alive_of(HEAD, peer) for peer in (receipted, bare, alive)))
    voter.round.remote(x.peer_id, join_of(HEAD, x))
    voter.hear_all(claim_of(HEAD, bare))
    receipt = receipt_of(updates[0], PEERS)
    voter.round.updates.add_receipt(receipt)
    assert kinds(voter.round.cuts.make()) == {
        (ItemKind.UPDATE, receipted.peer_id): receipt_hash(receipt),
        (ItemKind.ALIVE, bare.peer_id): NO_DIGEST,
        (ItemKind.ALIVE, alive.peer_id): NO_DIGEST,
        (ItemKind.CLAIM, bare.peer_id): NO_DIGEST,
        (ItemKind.JOIN, x.peer_id): NO_DIGEST,
    }
    named = {entry.statement for entry in voter.round.cuts.make().items}
    assert statement_hash(updates[1]) in named  # the manifest itself is its author's sign of life
    assert silent.peer_id not in {entry.peer for entry in voter.round.cuts.make().items}


def test_an_update_that_is_not_newer_than_its_peers_newest_is_no_item() -> None:
    after = follow(HEAD, trained_items(HEAD, PEERS))
    voter = OneVoter(after, PEERS)
    old = update_of(HEAD, PEERS[0], note="another")
    voter.round.late(PEERS[1].peer_id, old)
    held = voter.round.updates.slots[ItemKind.UPDATE, PEERS[0].peer_id, 2]
    held.receipt = receipt_of(old, PEERS)
    assert not voter.round.cuts.includable(held)
    assert voter.round.cuts.make().items == ()


def test_a_late_update_with_its_receipt_is_an_item() -> None:
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    voter = OneVoter(after, PEERS)
    old = update_of(HEAD, PEERS[0])
    voter.round.late(PEERS[1].peer_id, old)
    voter.round.late(PEERS[1].peer_id, receipt_of(old, PEERS))
    assert [(entry.kind, entry.statement) for entry in voter.round.cuts.make().items] == [
        (ItemKind.UPDATE, statement_hash(old))
    ]


# --- the inclusion rule ----------------------------------------------------------------------------------------------


def missing(voter: OneVoter, *signed: Signed, before_ms: int = 0) -> list[str]:
    return voter.round.cuts.missing([item_of(each) for each in signed], before_ms)


def test_what_was_held_in_time_must_be_named_kind_by_kind() -> None:
    voter = OneVoter(HEAD, PEERS)
    one, two, x = PEERS[0], PEERS[1], identity_of("x")
    voter.hear_all(alive_of(HEAD, one), claim_of(HEAD, one), update_of(HEAD, two))
    voter.round.remote(x.peer_id, join_of(HEAD, x))
    assert sorted(missing(voter)) == ["alive", "claim", "join", "manifest"]
    assert missing(voter, before_ms=-1) == []
    assert missing(voter, claim_of(HEAD, one, 7), join_of(HEAD, x, 9), alive_of(HEAD, two)) == []


def test_a_receipted_update_must_be_named_as_one_from_its_receipts_arrival_on() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    update = update_of(HEAD, author)
    voter.hear_all(update)
    voter.wait(300)
    voter.hear(author, receipt := receipt_of(update, PEERS))
    named = alive_of(HEAD, author)
    assert missing(voter, named, before_ms=299) == []
    assert missing(voter, before_ms=299) == ["manifest"]
    assert missing(voter, named, before_ms=300) == ["update of round 2"]
    items = [item_of(update, Receipt(2, receipt.manifest, receipt.acks[:2]))]
    assert voter.round.cuts.missing(items, 300) == []  # any receipt of the slot satisfies it


def test_a_late_manifest_without_receipt_says_nothing_about_this_round() -> None:
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    voter = OneVoter(after, PEERS)
    voter.round.late(PEERS[1].peer_id, update_of(HEAD, PEERS[0]))
    assert list(voter.round.updates.slots) == [(ItemKind.UPDATE, PEERS[0].peer_id, 2)]
    assert missing(voter) == []


def test_a_cut_that_leaves_an_update_out_gets_nil_and_the_reason_is_shown() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    update = update_of(HEAD, author)
    voter.hear_all(update, claim := claim_of(HEAD, author))
    voter.round.updates.add_receipt(receipt_of(update, PEERS))
    voter.hear_all(*(alive_of(HEAD, peer) for peer in PEERS))
    voter.others_ask_for_view(1, 3)
    voter.wait(100)
    voter.others_ask_for_view(2, 3)
    rest = [item for item in ALIVE if item.signed.peer != author.peer_id]
    voter.propose(voter.quiet_body([*rest, item_of(update), item_of(claim)], 2), view=2)
    assert voter.votes(Step.PREVOTE, 2) == [(NO_DIGEST, False)]
    notes = [effect.text for effect in voter.effects if isinstance(effect, fx.Notify)]
    assert "view 2: prevote nil: the cut leaves out update of round 2" in notes


def test_an_acker_that_left_counts_no_more_so_the_cut_has_no_receipt() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.others[0])
    with pytest.raises(RemoteProtocolError, match="lacks acks"):
        voter.hear_all(update)
        voter.round.updates.add_receipt(
            Receipt(
                2, statement_hash(update), tuple(mark_of(ack_of(update, identity_of(f"gone {n}"))) for n in range(3))
            )
        )
    assert voter.round.updates.receipts == {}
