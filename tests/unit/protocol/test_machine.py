"""From round to round: greetings, tips, catching up, leaving with a hand-over, and bounded inboxes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import decode, encode, sign
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import (
    Alive,
    Claim,
    Decided,
    HandoverDone,
    Join,
    Leave,
    Manifest,
    Message,
    Signed,
    SignedRun,
    TipAsk,
    Vote,
)
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, Step
from spes_p2p.testing.protocol_cases import (
    QUICK,
    alive_of,
    body_of,
    certificate_of,
    claim_of,
    identities,
    item_of,
    join_of,
    owned_head,
    pieces_of,
    quick_config,
    trained_items,
    transition_of,
    update_of,
    vote_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ME, OTHER = PEERS[0], PEERS[1]
RUN = HEAD.run.run_id


def machine_of(head: Head = HEAD, me: Identity = ME, **changes: object) -> RoundMachine:
    wishes = Wishes(**{"capacity": 2, "private_seed": b"mine", **changes})
    machine = RoundMachine(head, me, verify, wishes, now_ms=0)
    machine.start(0)
    return machine


def hears(machine: RoundMachine, message: Message, sender: Identity = OTHER, now_ms: int = 1) -> list[fx.Effect]:
    return machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms)


def sends(effects: Iterable[fx.Effect]) -> list[tuple[bytes, Message]]:
    return [(effect.to, decode(effect.data)) for effect in effects if isinstance(effect, fx.Send)]


def said(effects: Iterable[fx.Effect], kind: type) -> list[object]:
    found = {m.signature: m.body for _, m in sends(effects) if isinstance(m, Signed) and isinstance(m.body, kind)}
    return list(found.values())


def certificate(head: Head, items: Iterable[object] | None = None) -> Certificate:
    chosen = [item_of(alive_of(head, peer)) for peer in PEERS] if items is None else list(items)
    return certificate_of(head, body_of(head, transition_of(head, chosen)), PEERS)


NEXT = certificate(HEAD)
AFTER = next_head(HEAD, NEXT.body)


def ask_of(head: Head) -> TipAsk:
    """What a peer asks that builds on a head."""
    return TipAsk(head.epoch, head.round + 1, head.last_final.round, head.hash)


# --- what the shell may look at --------------------------------------------------------------------------------------


def test_a_machine_shows_whether_it_is_a_member_leaving_and_how_many_cuts_it_named() -> None:
    leader = next(peer for peer in PEERS if peer.peer_id == Terms(HEAD).leader(0))
    machine = machine_of(me=leader)
    assert (machine.is_member, machine.leaving, machine.num_cuts) == (True, False, 0)
    machine.handle(fx.StateReady(round=2), 1)
    machine.handle(fx.nothing_trained(2), 2)
    for peer in PEERS:
        if peer != leader:
            hears(machine, alive_of(HEAD, peer), peer, 3)
    assert machine.num_cuts == 1
    hears(machine, NEXT, now_ms=4)
    assert (machine.head, machine.num_cuts) == (AFTER, 1)
    machine.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 5)
    assert machine.leaving
    assert not machine_of(me=identity_of("x")).is_member


# --- sending until confirmed -----------------------------------------------------------------------------------------


def test_what_was_confirmed_is_not_sent_again_and_the_rest_is() -> None:
    machine = RoundMachine(HEAD, ME, verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
    first = [effect for effect in machine.start(0) if isinstance(effect, fx.Send)]
    confirmed, *rest = first
    machine.handle(fx.Delivered(ticket=confirmed.ticket), 1)
    again = [e for e in machine.handle(fx.Tick(), QUICK.resend_ms) if isinstance(e, fx.Send) and e.ticket]
    assert {(e.to, e.data) for e in again} >= {(e.to, e.data) for e in rest}
    assert (confirmed.to, confirmed.data) not in {(e.to, e.data) for e in again}


# --- tips ------------------------------------------------------------------------------------------------------------


def test_peers_that_discovery_found_are_asked_for_tips_too() -> None:
    x, known = identity_of("x"), [identity_of(f"known {n}").peer_id for n in range(3)]
    machine = machine_of(me=x)
    asked = [to for to, m in sends(machine.handle(fx.PeersKnown(peers=(x.peer_id, *known)), 0)) if m == ask_of(HEAD)]
    for now_ms in (QUICK.resend_ms, 2 * QUICK.resend_ms):
        asked += [to for to, m in sends(machine.handle(fx.Tick(), now_ms)) if m == ask_of(HEAD)]
    everybody = {*known, *(peer.peer_id for peer in PEERS)}
    assert set(asked) == everybody
    assert len(asked) == 9  # three a time, one after the other


def test_who_asks_from_an_older_round_gets_its_certificate_and_from_a_later_one_is_asked() -> None:
    machine = machine_of()
    hears(machine, NEXT)
    assert (OTHER.peer_id, NEXT) in sends(hears(machine, TipAsk(0, 2), now_ms=10))
    assert sends(hears(machine, TipAsk(0, 9), now_ms=11)) == [(OTHER.peer_id, ask_of(AFTER))]
    assert sends(hears(machine, TipAsk(0, 9), now_ms=12)) == []


def test_who_asks_about_the_open_round_gets_all_of_it_and_not_at_once_again() -> None:
    machine = machine_of()
    hears(machine, claim_of(HEAD, PEERS[2]), PEERS[2])
    effects = hears(machine, TipAsk(0, 2), now_ms=2)
    assert sorted(type(body).__name__ for body in said(effects, Alive | Claim)) == ["Alive", "Claim"]
    assert {to for to, _ in sends(effects)} == {OTHER.peer_id}
    assert sends(hears(machine, TipAsk(0, 2), now_ms=3)) == []
    assert sends(hears(machine, TipAsk(0, 2), identity_of("x"), 4)) == []


def test_a_certificate_far_ahead_makes_the_machine_ask_until_it_has_caught_up() -> None:
    after = next_head(AFTER, certificate(AFTER).body)
    machine = machine_of()
    assert sends(hears(machine, certificate(after))).count((OTHER.peer_id, ask_of(HEAD))) >= 1
    effects = hears(machine, NEXT, now_ms=2)
    assert (OTHER.peer_id, ask_of(AFTER)) in sends(effects)  # there is more
    machine.handle(fx.StateReady(round=3), 3)
    effects = hears(machine, certificate(AFTER), now_ms=4)
    assert machine.terms.round == 4
    assert (OTHER.peer_id, ask_of(after)) not in sends(effects)  # it is with the others again


def test_who_sends_a_message_of_an_older_round_is_told_that_it_is_decided() -> None:
    machine = machine_of()
    hears(machine, NEXT)
    vote = vote_of(Terms(HEAD), OTHER, Step.PREVOTE, digest("body"))
    assert sends(hears(machine, vote, now_ms=10)) == [(OTHER.peer_id, Decided(0, 2, AFTER.hash))]
    assert sends(hears(machine, vote, now_ms=11)) == []
    hears(machine, update_of(HEAD, OTHER), now_ms=12)
    assert (ItemKind.UPDATE, OTHER.peer_id, 2) in machine._round.updates.slots


def test_messages_older_than_late_ones_may_be_get_that_answer_and_nothing_else() -> None:
    machine, head = machine_of(), HEAD
    for number in range(4):
        following = certificate(head)
        hears(machine, following, now_ms=1 + number)
        head = next_head(head, following.body)
    assert machine.terms.round == 6
    effects = hears(machine, claim_of(HEAD, OTHER), now_ms=10)
    assert sends(effects) == [(OTHER.peer_id, Decided(0, 2, NO_DIGEST))]  # long ago: it would have to look it up
    assert (ItemKind.CLAIM, OTHER.peer_id, 0) not in machine._round.updates.slots


def test_a_run_manifest_belongs_to_no_round() -> None:
    with pytest.raises(RemoteProtocolError, match="belongs to no round"):
        hears(machine_of(), SignedRun(HEAD.run.manifest, bytes(64)))


# --- messages of the next round --------------------------------------------------------------------------------------


def test_a_kept_message_that_turns_out_wrong_is_told_and_the_others_count() -> None:
    machine = machine_of()
    wrong = vote_of(Terms(AFTER), identity_of("x"), Step.PREVOTE, digest("body"))
    hears(machine, wrong)
    hears(machine, claim_of(AFTER, OTHER))
    effects = hears(machine, NEXT, now_ms=2)
    notes = [effect.text for effect in effects if isinstance(effect, fx.Notify)]
    assert notes == ["dropped a message kept for this round: a vote of a peer that does not vote"]
    assert (ItemKind.CLAIM, OTHER.peer_id, 0) in machine._round.updates.slots


def test_a_machine_that_could_not_keep_messages_asks_for_more_once_it_has_caught_up() -> None:
    machine = machine_of()
    machine.handle(fx.StateReady(round=2), 0)
    for view in range(257):
        hears(machine, vote_of(Terms(AFTER), OTHER, Step.PREVOTE, digest("body"), view=view))
    assert (OTHER.peer_id, ask_of(AFTER)) in sends(hears(machine, NEXT, now_ms=2))


# --- from round to round ---------------------------------------------------------------------------------------------


def test_a_statement_that_has_expired_is_not_carried() -> None:
    machine, head = machine_of(), HEAD
    hears(machine, claim_of(HEAD, OTHER, 3))
    hears(machine, update_of(HEAD, PEERS[2]), PEERS[2])
    for number in range(3):
        following = certificate(head, [item_of(alive_of(head, peer)) for peer in PEERS])
        hears(machine, following, now_ms=2 + number)
        head = next_head(head, following.body)
        slots = machine._round.updates.slots
        assert ((ItemKind.UPDATE, PEERS[2].peer_id, 2) in slots) == (number < 2)
        assert ((ItemKind.CLAIM, OTHER.peer_id, 0) in slots) == (number < 2)


def test_one_without_a_vote_announces_no_certificate_and_the_announcers_tell_everybody() -> None:
    x = identity_of("x")
    head = next_head(
        HEAD, certificate(HEAD, [*(item_of(alive_of(HEAD, p)) for p in PEERS), item_of(join_of(HEAD, x))]).body
    )
    following, order = certificate(head), Terms(head).leaders
    by_id = {peer.peer_id: peer for peer in (*PEERS, x)}
    told = {}
    for peer in (x.peer_id, *order):
        effects = hears(machine_of(head, by_id[peer]), following, PEERS[0] if peer != PEERS[0].peer_id else OTHER)
        told[peer] = {to for to, m in sends(effects) if isinstance(m, Decided)}
    voters = {peer.peer_id for peer in PEERS}
    assert told[x.peer_id] == set()
    assert {peer: told[peer] for peer in order[:2]} == {peer: {*voters, x.peer_id} - {peer} for peer in order[:2]}
    assert {peer: told[peer] for peer in order[2:]} == {peer: voters - {peer} for peer in order[2:]}


def test_a_quorum_of_precommits_ends_the_round_and_the_next_ones_follow_at_once() -> None:
    machine = machine_of()
    for peer in PEERS[1:]:
        hears(machine, alive_of(HEAD, peer), peer)
    machine.handle(fx.StateReady(round=2), 1)
    effects = machine.handle(fx.nothing_trained(2), 1)
    assert machine._round.voting.view == 0
    known = machine._round.bodies.learn(NEXT.body, b"", [OTHER.peer_id])
    for peer in PEERS[1:]:
        effects = hears(machine, vote_of(Terms(HEAD), peer, Step.PRECOMMIT, known.hash), peer, 2)
    (adopt,) = [effect for effect in effects if isinstance(effect, fx.Adopt)]
    assert (adopt.head, adopt.certificate.view) == (AFTER, 0)
    assert adopt.holders == tuple(peer.peer_id for peer in PEERS[1:])
    assert machine.terms.round == 3


# --- joining ---------------------------------------------------------------------------------------------------------


def test_a_finished_or_leaving_stranger_does_not_ask_to_join() -> None:
    x = identity_of("x")
    finished = machine_of(me=x, stop_after_round=1)
    assert said(finished.handle(fx.StateReady(round=2), 1), Join) == []
    leaving = machine_of(me=x)
    leaving.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 1)
    assert said(leaving.handle(fx.StateReady(round=2), 2), Join) == []


def test_in_an_open_run_the_join_goes_to_all_members() -> None:
    head = owned_head(PEERS, quick_config(admission="open"))
    effects = machine_of(head, identity_of("x")).handle(fx.StateReady(round=2), 1)
    assert {to for to, m in sends(effects) if isinstance(m, Signed) and isinstance(m.body, Join)} == {
        peer.peer_id for peer in PEERS
    }


# --- leaving ---------------------------------------------------------------------------------------------------------

HANDOVER = digest("hand-over")


def leaving(handover: bytes | None = HANDOVER) -> tuple[RoundMachine, Head, list[fx.Effect]]:
    """A machine whose leave has just been certified; the head after that, and the effects."""
    machine = machine_of()
    machine.handle(fx.LeaveWanted(handover=handover, handover_bytes=9), 1)
    leave = sign(ME, Leave(RUN, 0, 2, handover or bytes(32), 9 if handover else 0))
    items = [*(item_of(alive_of(HEAD, peer)) for peer in PEERS), item_of(leave)]
    items += [item_of(claim_of(HEAD, peer, 8)) for peer in PEERS[1:]]
    following = certificate(HEAD, items)
    effects = hears(machine, following, now_ms=2)
    return machine, next_head(HEAD, following.body), effects


def has_left(effects: Iterable[fx.Effect]) -> bool:
    return any(isinstance(effect, fx.Left) for effect in effects)


def successors(head: Head) -> set[bytes]:
    return {owner for shard in HEAD.state.shards_of(ME.peer_id) for owner in head.state.owners(shard)}


def test_a_leaver_serves_until_every_successor_has_taken_over() -> None:
    machine, head, effects = leaving()
    assert not has_left(effects)
    waiting = successors(head)
    assert waiting != set()
    assert ME.peer_id not in waiting
    by_id = {peer.peer_id: peer for peer in PEERS}
    for number, peer in enumerate(sorted(waiting)):
        wrong = hears(machine, HandoverDone(2, digest("another")), by_id[peer], 10)
        assert not has_left(wrong)
        assert has_left(hears(machine, HandoverDone(2, HANDOVER), by_id[peer], 11)) == (number == len(waiting) - 1)
    assert not has_left(hears(machine, HandoverDone(2, HANDOVER), OTHER, 12))  # said once


def test_a_leaver_waits_for_successors_no_longer_than_round_max() -> None:
    machine, _, effects = leaving()
    assert not has_left(effects)
    assert not has_left(machine.handle(fx.Tick(), 2 + QUICK.round_max_ms - 1))
    assert has_left(machine.handle(fx.Tick(), 2 + QUICK.round_max_ms))


def test_a_leaver_without_a_hand_over_may_go_with_its_certificate() -> None:
    _, _, effects = leaving(None)
    assert has_left(effects)


def test_a_leave_that_is_certified_is_not_asked_for_again() -> None:
    machine, _, _ = leaving()
    effects = machine.handle(fx.LeaveWanted(handover=digest("other"), handover_bytes=1), 5)
    assert said(effects, Leave) == []
    assert not has_left(effects)


def test_a_confirmation_before_the_certificate_or_without_a_leave_ends_nothing() -> None:
    assert not has_left(hears(machine_of(), HandoverDone(2, HANDOVER)))
    machine = machine_of()
    machine.handle(fx.LeaveWanted(handover=HANDOVER, handover_bytes=9), 1)
    assert not has_left(hears(machine, HandoverDone(2, HANDOVER), now_ms=2))


def test_a_successor_tells_the_leaver_that_it_has_taken_over() -> None:
    machine = machine_of()
    effects = machine.handle(fx.HandoverTaken(leaver=OTHER.peer_id, round=2, handover=HANDOVER), 1)
    assert (OTHER.peer_id, HandoverDone(2, HANDOVER)) in sends(effects)


def test_who_has_seen_the_cut_learns_of_the_hand_overs_in_it() -> None:
    leave = sign(OTHER, Leave(RUN, 0, 2, HANDOVER, 9))
    without = sign(PEERS[2], Leave(RUN, 0, 2, bytes(32), 0))
    items = [*(item_of(alive_of(HEAD, peer)) for peer in PEERS), item_of(leave), item_of(without)]
    following = certificate(HEAD, items)
    seen, unseen = machine_of(), machine_of()
    for item in items:
        hears(seen, item.signed, PEERS[3])
    cut = seen._round.cuts.make()
    seen._round.cuts.learn(cut, [OTHER.peer_id])
    for machine, expected in ((seen, ((OTHER.peer_id, HANDOVER, 9),)), (unseen, ())):
        (adopt,) = [e for e in hears(machine, following, PEERS[3], 2) if isinstance(e, fx.Adopt)]
        assert adopt.handovers == expected


def test_a_late_update_is_published_although_the_round_has_passed() -> None:
    machine = machine_of()
    machine.handle(fx.StateReady(round=2), 1)
    hears(machine, NEXT, now_ms=2)
    pieces = pieces_of(HEAD, ME.peer_id)
    trained = fx.Trained(round=2, tokens=9, steps=1, loss_micronats=1, pieces=pieces)
    manifests = said(machine.handle(trained, 3), Manifest)
    assert [(body.round, body.prev) for body in manifests if isinstance(body, Manifest)] == [(2, HEAD.hash)]


def test_votes_of_the_next_round_count_when_it_opens() -> None:
    machine = machine_of()
    hears(machine, vote_of(Terms(AFTER), OTHER, Step.PREVOTE, digest("body")))
    hears(machine, NEXT, now_ms=2)
    votes = machine._round.voting.votes[Step.PREVOTE][0]
    assert [vote.body.body for vote in votes.values() if isinstance(vote.body, Vote)] == [digest("body")]


def test_accepted_updates_feed_the_yardstick_of_norms() -> None:
    machine = machine_of()
    items = trained_items(HEAD, PEERS)
    for item in items:
        hears(machine, item.signed, PEERS[3] if item.signed.peer != ME.peer_id else OTHER)
    hears(machine, certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, items)), PEERS), now_ms=2)
    assert machine._history.norms.psi == ((2.0, 10),) * 4
    assert machine._history.norms.experts == ((1.0, 10),) * 8


def test_a_confirmation_makes_nothing_possible_but_what_is_due_is_done_all_the_same() -> None:
    machine = machine_of()
    machine.handle(fx.Tick(), 0)
    due = machine.deadline_ms()
    assert due is not None
    assert machine.handle(fx.Delivered(ticket=1), due - 1) == []
    assert machine.deadline_ms() == due
    assert any(isinstance(effect, fx.Send) for effect in machine.handle(fx.Delivered(ticket=2), due))
