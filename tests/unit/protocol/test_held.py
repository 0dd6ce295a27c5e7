"""A peer whose training is held asks for nothing that it would not train."""

from __future__ import annotations

from spes_p2p.crypto import verify
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import decode, encode
from spes_p2p.protocol.messages import Alive, Claim, Signed
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing import protocol_cases as cases

PEERS = cases.identities(4)
HEAD = cases.owned_head(PEERS)
ME = PEERS[0]


def after_a_round(machine: RoundMachine, now_ms: int) -> list[object]:
    """What a machine says when everybody else's signs of life have become a certificate."""
    head = machine.head
    items = [cases.item_of(cases.alive_of(head, peer)) for peer in PEERS]
    certificate = cases.certificate_of(head, cases.body_of(head, cases.transition_of(head, items)), PEERS)
    effects = machine.handle(fx.Received(sender=PEERS[1].peer_id, data=encode(certificate)), now_ms)
    sent = [decode(effect.data) for effect in effects if isinstance(effect, fx.Send)]
    return list({one.signature: one.body for one in sent if isinstance(one, Signed)}.values())


def machine_of(capacity: int) -> RoundMachine:
    machine = RoundMachine(HEAD, ME, verify, Wishes(capacity=capacity, private_seed=b"x"), now_ms=0)
    machine.start(0)
    return machine


def test_while_held_it_states_no_capacity_and_afterwards_the_whole_again() -> None:
    machine = machine_of(capacity=7)
    machine.handle(fx.HoldWanted(held=True), 1)
    said = after_a_round(machine, 2)
    assert [body.capacity for body in said if isinstance(body, Claim)] == [0]
    assert any(isinstance(body, Alive) for body in said)
    machine.handle(fx.HoldWanted(held=False), 3)
    assert [body.capacity for body in after_a_round(machine, 4) if isinstance(body, Claim)] == [7]


def test_hold_does_not_stop_a_founder_from_claiming_in_round_one() -> None:
    genesis = cases.genesis_of(PEERS)
    machine = RoundMachine(genesis, ME, verify, Wishes(capacity=2, private_seed=b"x").holding(True), now_ms=0)
    sent = [decode(effect.data) for effect in machine.start(0) if isinstance(effect, fx.Send)]
    assert [one.body.capacity for one in sent if isinstance(one, Signed) and isinstance(one.body, Claim)][:1] == [2]
