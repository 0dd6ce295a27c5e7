"""Whole machines by hand: a few peers whose training gives nothing, and lines that can be cut."""

import heapq
from collections.abc import Callable

import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import body_hash, decode, encode
from spes_p2p.protocol.head import Head, next_head
from spes_p2p.protocol.messages import Message, Signed, TipAsk, Vote
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import Step
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    identities,
    item_of,
    join_of,
    owned_head,
    transition_of,
)
from spes_p2p.testing.swarm import identity_of

MINUTE_MS = 60_000


class Hall:
    """Machines that hear each other after 10 ms. Training takes 8 s."""

    def __init__(self, head: Head, peers: list[Identity], **wishes: object) -> None:
        self.now_ms = 0
        self.peers = {peer.peer_id: peer for peer in peers}
        self.machines: dict[PeerId, RoundMachine] = {}
        self.journals: dict[PeerId, dict[str, bytes]] = {peer: {} for peer in self.peers}
        self.chains: dict[PeerId, list[Certificate]] = {peer: [] for peer in self.peers}
        self.effects: dict[PeerId, list[fx.Effect]] = {peer: [] for peer in self.peers}
        self.passes: Callable[[PeerId, PeerId, Message], bool] = lambda sender, receiver, message: True
        self.problems: list[str] = []
        self._queue: list[tuple[int, int, PeerId, fx.Input]] = []
        self._count = 0
        for peer in peers:
            self.start(peer, head, **wishes)

    def start(self, peer: Identity, head: Head, **wishes: object) -> None:
        """Begin, or begin again from the journal."""
        made = Wishes(capacity=2, private_seed=digest("private", peer.peer_id), **wishes)
        machine = RoundMachine(head, peer, verify, made, now_ms=self.now_ms, journal=dict(self.journals[peer.peer_id]))
        self.machines[peer.peer_id] = machine
        self._do(peer.peer_id, machine.start(self.now_ms))
        self._later(10, peer.peer_id, fx.StateReady(round=head.round + 1, head=head.hash))

    def _later(self, delay_ms: int, peer: PeerId, event: fx.Input) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._count, peer, event))

    def _do(self, peer: PeerId, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.effects[peer].append(effect)
            match effect:
                case fx.Persist():
                    self.journals[peer].update(effect.entries)
                case fx.Send() if effect.to in self.machines and self.passes(peer, effect.to, decode(effect.data)):
                    self._later(10, effect.to, fx.Received(sender=peer, data=effect.data))
                    self._later(20, peer, fx.Delivered(ticket=effect.ticket))
                case fx.Serve():
                    for certificate in self.chains[peer]:
                        if certificate.body.round == effect.round and self.passes(peer, effect.to, certificate):
                            self._later(10, effect.to, fx.Received(sender=peer, data=encode(certificate)))
                case fx.Train():
                    self._later(8_000, peer, fx.nothing_trained(effect.round, effect.base))
                case fx.Adopt() | fx.GoBack():
                    gone, chain = effect.abandoned, self.chains[peer]
                    self.chains[peer] = [c for c in chain if body_hash(c.body) not in gone]
                    if isinstance(effect, fx.Adopt):
                        self.chains[peer].append(effect.certificate)
                    ready = fx.StateReady(round=effect.head.round + 1, head=effect.head.hash)
                    self._later(10, peer, ready)
                case _:
                    pass

    def give(self, peer: PeerId, event: fx.Input) -> None:
        try:
            effects = self.machines[peer].handle(event, self.now_ms)
        except RemoteProtocolError as error:
            self.problems.append(error.reason)
            effects = self.machines[peer].handle(fx.Tick(), self.now_ms)
        self._do(peer, effects)

    def run(self, until: Callable[[], bool], limit_ms: int = 5 * MINUTE_MS) -> bool:
        end = self.now_ms + limit_ms
        while not until():
            due = min([machine.deadline_ms() or end for machine in self.machines.values()])
            if self._queue and self._queue[0][0] <= due:
                self.now_ms, _, peer, event = heapq.heappop(self._queue)
                if peer in self.machines:
                    self.give(peer, event)
                continue
            if due > end:
                return False
            self.now_ms = max(due, self.now_ms)
            for peer, machine in list(self.machines.items()):
                deadline = machine.deadline_ms()
                if deadline is not None and deadline <= self.now_ms:
                    self.give(peer, fx.Tick())
        return True

    def cut(self, *groups: tuple[PeerId, ...]) -> None:
        place = {peer: number for number, group in enumerate(groups) for peer in group}
        self.passes = lambda sender, receiver, message: place.get(sender) == place.get(receiver)

    def heal(self) -> None:
        self.passes = lambda sender, receiver, message: True

    def heads(self) -> list[Head]:
        return [machine.head for machine in self.machines.values()]

    def notes(self, peer: PeerId) -> list[str]:
        return [effect.text for effect in self.effects[peer] if isinstance(effect, fx.Notify)]


def hall_of(num_peers: int, **wishes: object) -> tuple[Hall, tuple[PeerId, ...]]:
    peers = identities(num_peers)
    hall = Hall(owned_head(peers), peers, **wishes)
    return hall, tuple(hall.peers)


def all_final(hall: Hall, after: int) -> Callable[[], bool]:
    return lambda: all(head.is_final and head.round > after for head in hall.heads())


def test_one_of_two_goes_on_alone_and_they_become_one() -> None:
    hall, (one, other) = hall_of(2)
    hall.cut((one,), (other,))
    assert hall.run(lambda: all(head.round >= 4 for head in hall.heads()))
    assert [head.side for head in hall.heads()] == [(one,), (other,)]
    assert len({head.hash for head in hall.heads()}) == 2
    hall.heal()
    assert hall.run(all_final(hall, 4))
    assert len({head.hash for head in hall.heads()}) == 1
    tip, body = (certificate.body for certificate in hall.chains[one][-2:])
    assert (body.round, body.via) == (tip.round + 1, body_hash(tip))
    lost = [e.abandoned for peer in (one, other) for e in hall.effects[peer] if isinstance(e, fx.Adopt)]
    assert [len(found) >= 3 for found in lost if found] == [True]
    assert hall.problems == []


def test_a_locked_body_becomes_final_after_a_detour_of_both_sides() -> None:
    hall, peers = hall_of(4)

    def no_final_precommit(sender: PeerId, receiver: PeerId, message: Message) -> bool:
        body = message.body if isinstance(message, Signed) else None
        return not (isinstance(body, Vote) and body.step is Step.PRECOMMIT and body.branch == b"")

    hall.passes = no_final_precommit
    assert hall.run(lambda: all(any("ballot/lock" in key for key in hall.journals[peer]) for peer in peers))
    bound = {hall.journals[peer]["000000/0000000002/ballot/lock"].split()[1].decode() for peer in peers}
    hall.cut(peers[:2], peers[2:])
    assert hall.run(lambda: all(head.num_tentative == 2 for head in hall.heads()))
    assert len({head.hash for head in hall.heads()}) == 2
    hall.heal()
    assert hall.run(lambda: all(hall.chains[peer] and hall.chains[peer][0].body.final for peer in peers))
    assert {body_hash(hall.chains[peer][0].body).hex() for peer in peers} == bound
    assert any(isinstance(effect, fx.GoBack) for peer in peers for effect in hall.effects[peer])
    assert hall.run(all_final(hall, 3))


def test_after_a_restart_on_a_tentative_tip_the_height_goes_on() -> None:
    hall, (one, other) = hall_of(2)
    hall.cut((one,), (other,))
    assert hall.run(lambda: all(head.round >= 3 for head in hall.heads()))
    tentative = hall.machines[one].head
    hall.start(hall.peers[one], tentative)
    assert hall.machines[one].head.num_tentative == tentative.num_tentative
    assert hall.run(lambda: hall.machines[one].head.round == tentative.round + 1)
    hall.heal()
    assert hall.run(all_final(hall, 4))
    assert len({head.hash for head in hall.heads()}) == 1


def test_a_minority_waits_and_says_so_and_goes_on_when_it_is_whole() -> None:
    hall, peers = hall_of(4)
    hall.cut(peers[:1], peers[1:])
    assert hall.run(lambda: bool(hall.machines[peers[0]].progress(hall.now_ms).waiting))
    text = "1 of 4 voters heard, 3 needed"
    assert hall.machines[peers[0]].progress(hall.now_ms).waiting == text
    assert hall.notes(peers[0]).count(f"waiting: {text}") == 1
    hall.heal()
    assert hall.run(all_final(hall, 4))
    assert hall.machines[peers[0]].progress(hall.now_ms).waiting == ""


def test_a_side_that_becomes_too_small_waits() -> None:
    hall, peers = hall_of(4)
    hall.cut(peers[:2], peers[2:])
    assert hall.run(lambda: hall.machines[peers[0]].head.num_tentative == 1)
    assert hall.machines[peers[0]].terms.side == tuple(sorted(peers[:2]))
    hall.cut(peers[:1], peers[1:2], peers[2:])
    assert hall.run(lambda: bool(hall.machines[peers[0]].progress(hall.now_ms).waiting))
    assert hall.machines[peers[0]].terms.side == ()


def test_members_without_a_vote_follow_the_side_of_a_voter_and_come_back_with_it() -> None:
    founders, guest = identities(2), identity_of("guest")
    head = owned_head(founders)
    alive = [item_of(alive_of(head, founder)) for founder in founders]
    items = [item_of(join_of(head, guest)), *alive]
    head = next_head(head, body_of(head, transition_of(head, items)))
    hall = Hall(head, [*founders, guest])
    one, other = (peer.peer_id for peer in founders)
    hall.cut((one, guest.peer_id), (other,))
    assert hall.run(lambda: hall.machines[guest.peer_id].terms.side == (one,))
    assert guest.peer_id in hall.machines[one].terms.eligible
    assert hall.run(lambda: hall.machines[guest.peer_id].head.num_tentative == 2)
    hall.heal()
    assert hall.run(all_final(hall, 4))
    assert hall.machines[guest.peer_id].terms.side == ()


def test_who_was_away_for_long_gets_the_whole_branch_in_batches() -> None:
    hall, (one, other) = hall_of(2)
    hall.cut((one,), (other,))
    hall.machines.pop(other)
    assert hall.run(lambda: hall.machines[one].head.num_tentative == 20, 30 * MINUTE_MS)
    hall.heal()
    hall.start(hall.peers[other], owned_head(identities(2)))
    assert hall.run(all_final(hall, 20), 10 * MINUTE_MS)
    assert len(hall.chains[other]) == len(hall.chains[one])


def test_a_certificate_of_another_run_or_epoch_is_refused_or_ignored() -> None:
    hall, (one, other) = hall_of(2)
    head = hall.machines[one].head
    body = body_of(head, transition_of(head, [item_of(alive_of(head, hall.peers[one]))]))
    good = certificate_of(head, body, list(hall.peers.values()))
    from msgspec import structs

    foreign = structs.replace(good, body=structs.replace(body, run=bytes(32)))
    with pytest.raises(RemoteProtocolError, match="another run"):
        hall.machines[one].handle(fx.Received(sender=other, data=encode(foreign)), 0)
    loose = structs.replace(good, body=structs.replace(body, prev=bytes(31) + b"x"))
    effects = hall.machines[one].handle(fx.Received(sender=other, data=encode(loose)), 0)
    assert any(isinstance(e, fx.Send) and isinstance(decode(e.data), TipAsk) for e in effects)
