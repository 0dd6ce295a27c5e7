"""What was signed is in the journal before it leaves, and after a restart the identical bytes leave again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import LocalProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import decode, encode, statement_hash
from spes_p2p.protocol.context import still_acked
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Ack, Alive, Claim, Join, Leave, Manifest, PartDigest, Signed, Vote
from spes_p2p.protocol.receipts import mark_of
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.one_voter import OneVoter
from spes_p2p.testing.protocol_cases import (
    ack_of,
    alive_of,
    body_of,
    certificate_of,
    follow,
    identities,
    item_of,
    owned_head,
    pieces_of,
    trained_items,
    transition_of,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ME, OTHERS = PEERS[0], PEERS[1:]
STRANGER = identity_of("stranger")
INVITED = identity_of("invite").sign("invite", invite_payload(HEAD.run.run_id, STRANGER.peer_id))
QUIET = body_of(HEAD, transition_of(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS]))
NEXT = certificate_of(HEAD, QUIET, PEERS)
"""A certificate of round 2 that names no update."""


class Node:
    """A machine and its disk. Whatever leaves is checked to be on the disk first."""

    def __init__(
        self, head: Head = HEAD, me: Identity = ME, journal: Mapping[str, bytes] | None = None, capacity: int = 2
    ) -> None:
        wishes = Wishes(capacity=capacity, private_seed=b"mine", invite_signature=INVITED)
        self.journal = dict(journal or {})
        self.machine = RoundMachine(head, me, verify, wishes, now_ms=0, journal=self.journal)
        self.me, self.now_ms = me, 0
        self.said: dict[type, list[bytes]] = {}
        self.effects: list[fx.Effect] = []
        self.take(self.machine.start(0))

    def take(self, effects: Iterable[fx.Effect]) -> None:
        for effect in effects:
            self.effects.append(effect)
            if isinstance(effect, fx.Persist):
                self.journal.update(effect.entries)
            elif isinstance(effect, fx.Send):
                message = decode(effect.data)
                if isinstance(message, Signed) and message.peer == self.me.peer_id:
                    kept = self.said.setdefault(type(message.body), [])
                    if effect.data not in kept:
                        kept.append(effect.data)
                    if not isinstance(message.body, Ack):
                        assert effect.data in self.journal.values(), f"a {message.body.tag} left before it was durable"

    def give(self, event: fx.Input) -> None:
        self.now_ms += 1
        self.take(self.machine.handle(event, self.now_ms))

    def hear(self, message: Signed | Certificate, sender: Identity = OTHERS[0]) -> None:
        self.give(fx.Received(sender=sender.peer_id, data=encode(message)))

    def restarted(self, capacity: int = 2) -> Node:
        return Node(self.machine.head, self.me, self.journal, capacity)


def trained(round_number: int = 2, head: Head = HEAD, note: str = "") -> fx.Trained:
    pieces = pieces_of(head, ME.peer_id, note)
    return fx.Trained(round=round_number, tokens=9, steps=1, loss_micronats=1, pieces=pieces)


def trains(node: Node) -> list[int]:
    return [effect.round for effect in node.effects if isinstance(effect, fx.Train)]


def test_alive_leaves_again_as_it_was() -> None:
    node = Node()
    again = node.restarted()
    assert again.said[Alive] == node.said[Alive]
    assert len(node.said[Alive]) == 1


def test_alive_no_more_is_not_taken_back_by_a_restart() -> None:
    node = Node()
    node.give(fx.StateReady(round=2))
    node.give(fx.nothing_trained(2))
    again = node.restarted()
    again.give(fx.StateReady(round=2))
    assert again.said[Alive] == node.said[Alive][1:]
    assert trains(again) == []


def test_a_claim_stays_as_it_was_signed_although_the_capacity_has_changed_since() -> None:
    node = Node(capacity=5)
    (claim,) = node.said[Claim]
    assert decode(claim).body.capacity == 5
    assert node.restarted(capacity=3).said[Claim] == [claim]


def test_a_leave_names_the_hand_over_that_was_promised_first() -> None:
    node, first, second = Node(), digest("first"), digest("second")
    node.give(fx.LeaveWanted(handover=first, handover_bytes=7))
    again = node.restarted()
    again.give(fx.LeaveWanted(handover=second, handover_bytes=8))
    assert again.said[Leave] == node.said[Leave]
    assert decode(node.said[Leave][0]).body.handover == first


def test_a_leave_in_the_journal_does_not_leave_by_itself() -> None:
    node = Node()
    node.give(fx.LeaveWanted(handover=None, handover_bytes=0))
    assert Leave not in node.restarted().said


def test_a_join_leaves_again_as_it_was() -> None:
    node = Node(me=STRANGER)
    node.give(fx.StateReady(round=2))
    again = node.restarted(capacity=1)
    again.give(fx.StateReady(round=2))
    assert again.said[Join] == node.said[Join]
    assert decode(node.said[Join][0]).body.capacity == 2


def test_an_update_leaves_again_and_nothing_is_trained_twice() -> None:
    node = Node()
    node.give(fx.StateReady(round=2))
    node.give(trained())
    again = node.restarted()
    again.give(fx.StateReady(round=2))
    again.give(trained(note="another result"))
    assert again.said[Manifest] == node.said[Manifest]
    assert (trains(node), trains(again)) == ([2], [])


def test_an_update_that_no_certificate_named_outlives_a_restart_in_the_next_rounds() -> None:
    node = Node()
    node.give(fx.StateReady(round=2))
    node.give(trained())
    node.hear(NEXT)
    assert node.machine.terms.round == 3
    again = node.restarted()
    again.give(fx.StateReady(round=3))
    assert again.said[Manifest] == node.said[Manifest]
    assert trains(again) == [3]
    again.give(trained(note="another result"))
    assert again.said[Manifest] == node.said[Manifest]


def test_a_late_update_leaves_again_although_nothing_more_is_trained() -> None:
    node = Node()
    node.give(fx.StateReady(round=2))
    node.give(trained())
    node.hear(NEXT)
    node.give(fx.StateReady(round=3))
    node.give(fx.nothing_trained(3))
    again = node.restarted()
    again.give(fx.StateReady(round=3))
    assert again.said[Manifest] == node.said[Manifest]
    assert trains(again) == []


def test_an_update_that_was_certified_is_not_sent_again() -> None:
    node = Node()
    node.give(fx.StateReady(round=2))
    items = trained_items(HEAD, PEERS)
    mine = next(item.signed for item in items if item.signed.peer == ME.peer_id)
    node.give(fx.Trained(round=2, tokens=1000, steps=10, loss_micronats=2_000_000, pieces=mine.body.pieces))
    node.hear(certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, items)), PEERS))
    again = node.restarted()
    again.give(fx.StateReady(round=3))
    assert Manifest not in again.said


def test_a_digest_is_not_signed_a_second_time_with_another_value() -> None:
    updates = digest("updates")
    voter = OneVoter(HEAD, PEERS)
    voter.round.local(fx.Aggregated(updates=updates, part=1, digest=digest("one"), recheck=False))
    voter.wait(1)
    again = OneVoter(HEAD, PEERS, voter.journal)
    again.round.local(fx.Aggregated(updates=updates, part=1, digest=digest("two"), recheck=False))
    again.wait(1)

    def digests(of: OneVoter) -> set[bytes]:
        return {encode(m) for _, m in of.sent if isinstance(m, Signed) and isinstance(m.body, PartDigest)}

    assert digests(again) == digests(voter)
    assert len(digests(voter)) == 1


def test_every_vote_and_view_change_is_durable_before_it_leaves() -> None:
    voter = OneVoter(HEAD, PEERS)
    voter.hear_all(*(alive_of(HEAD, peer) for peer in PEERS))
    voter.propose(voter.quiet_body([item_of(alive_of(HEAD, peer)) for peer in PEERS]))
    votes = [m for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Vote)]
    assert len(votes) == 3
    for message in votes:
        place = next(i for i, e in enumerate(voter.effects) if isinstance(e, fx.Send) and e.data == encode(message))
        stored = [e for e in voter.effects[:place] if isinstance(e, fx.Persist)]
        assert any(encode(message) in e.entries.values() for e in stored)


def test_a_journal_is_restored_before_anything_is_signed_and_of_its_round_only() -> None:
    node = Node()
    other_round = {key.replace("0000000002/", "0000000007/"): data for key, data in node.journal.items()}
    fresh = Node(journal=other_round)
    assert set(fresh.machine._round.context.journal) == set(node.journal)
    with pytest.raises(LocalProtocolError, match="before anything is signed"):
        fresh.machine._round.context.restore(node.journal)


# --- acks ------------------------------------------------------------------------------------------------------------


def test_an_ack_with_fewer_pieces_takes_none_back() -> None:
    voter = OneVoter(HEAD, PEERS)
    update = update_of(HEAD, voter.me)
    voter.hear_all(update)
    (acker, *_) = voter.others
    large, small = ack_of(update, acker, range(5)), ack_of(update, acker, range(3))
    held = voter.round.updates.slots[ItemKind.UPDATE, voter.me.peer_id, 2]
    for ack, counted in ((small, small), (large, large), (small, large)):
        voter.hear(acker, ack)
        assert held.acks == {acker.peer_id: mark_of(counted)}


def test_after_a_restart_the_update_that_was_acknowledged_is_acknowledged_again_and_no_other() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    update, other = update_of(HEAD, author), update_of(HEAD, author, note="other")
    voter.hear(author, update)
    acks: list[set[bytes]] = []
    for each in (voter, OneVoter(HEAD, PEERS, voter.journal)):
        each.hear(author, update, other)
        for effect in each.effects:
            if isinstance(effect, fx.CheckPiece):
                each.round.local(fx.PieceChecked(manifest=effect.manifest, piece=effect.piece_index, reason=None))
        each.wait(1)
        acks.append({encode(m) for _, m in each.sent if isinstance(m, Signed) and isinstance(m.body, Ack)})
    assert acks[0] == acks[1]
    assert len(acks[0]) == 1


def acknowledges(voter: OneVoter, author: Identity, update: Signed) -> bool:
    """Whether a voter that finds all pieces of an update fine acknowledges it."""
    voter.hear(author, update)
    for effect in list(voter.effects):
        if isinstance(effect, fx.CheckPiece):
            voter.round.local(fx.PieceChecked(manifest=effect.manifest, piece=effect.piece_index, reason=None))
    voter.wait(1)
    acks = [m.body for _, m in voter.sent if isinstance(m, Signed) and isinstance(m.body, Ack)]
    return any(ack.manifest == statement_hash(update) for ack in acks)


def test_what_was_acknowledged_stays_promised_in_later_rounds_until_the_slot_is_served() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    update, other = update_of(HEAD, author), update_of(HEAD, author, note="other")
    assert acknowledges(voter, author, update)
    after = follow(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS])
    promised = still_acked(voter.journal, voter.terms, Terms(after))
    assert list(promised.values()) == [statement_hash(update)]
    assert not acknowledges(OneVoter(after, PEERS, promised, me=voter.me), author, other)
    assert acknowledges(OneVoter(after, PEERS, promised, me=voter.me), author, update)
    assert acknowledges(OneVoter(after, PEERS, me=voter.me), author, other)
    row = after.state.row(author.peer_id)
    assert row is not None
    rows = tuple(msgspec.structs.replace(row, base_round=2) if r == row else r for r in after.state.roster)
    served = replace(after, state=msgspec.structs.replace(after.state, roster=rows))
    assert still_acked(voter.journal, voter.terms, Terms(served)) == {}


def test_a_certificate_that_ends_a_height_takes_what_was_acknowledged_into_the_journal_of_the_next() -> None:
    voter = OneVoter(HEAD, PEERS)
    author = voter.others[0]
    assert acknowledges(voter, author, update_of(HEAD, author))
    body = body_of(HEAD, transition_of(HEAD, [item_of(alive_of(HEAD, peer)) for peer in PEERS]))
    machine = RoundMachine(
        HEAD, voter.me, verify, Wishes(capacity=2, private_seed=b""), now_ms=0, journal=dict(voter.journal)
    )
    certificate = certificate_of(HEAD, body, PEERS)
    effects = machine.handle(fx.Received(sender=author.peer_id, data=encode(certificate)), 1)
    taken = still_acked(voter.journal, voter.terms, machine.terms)
    assert taken
    assert fx.Persist(entries=taken) in effects
