"""A machine that goes to another branch: which certificates it adopts on the way, and what it serves afterwards."""

from __future__ import annotations

from spes_p2p.crypto import verify
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import TipAsk
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing import protocol_cases as cases

PEERS = sorted(cases.identities(3), key=lambda peer: peer.peer_id)
ME, OTHER = PEERS[0], PEERS[1].peer_id
START = cases.owned_head(PEERS)
Made = tuple[Certificate, Head]


def certify(head: Head, makers: list[int], *, final: bool = False, trained: bool = False) -> Made:
    return cases.round_of(head, [PEERS[place] for place in makers], tentative=not final, trained=trained)


LEFT = [certify(START, [0, 1])]
LEFT.append(certify(LEFT[0][1], [0, 1]))
RIGHT = [certify(START, [0, 2])]
RIGHT.append(certify(RIGHT[0][1], [0, 2]))
RIGHT.append(certify(RIGHT[1][1], [0, 2]))


def machine_at(head: Head) -> RoundMachine:
    machine = RoundMachine(head, ME, verify, Wishes(capacity=2, private_seed=bytes(32)), now_ms=0)
    machine.start(0)
    return machine


def show(machine: RoundMachine, made: list[Made]) -> list[fx.Effect]:
    return [
        effect
        for certificate, _ in made
        for effect in machine.handle(fx.Received(sender=OTHER, data=encode(certificate)), 1)
    ]


def adopted(effects: list[fx.Effect]) -> list[fx.Adopt]:
    return [effect for effect in effects if isinstance(effect, fx.Adopt)]


def hashes(made: list[Made]) -> list[bytes]:
    return [body_hash(certificate.body) for certificate, _ in made]


def test_a_final_certificate_on_another_branch_brings_the_certificates_between() -> None:
    machine = machine_at(START)
    show(machine, LEFT[:1])
    show(machine, RIGHT[:1])
    best, rest = sorted((LEFT[:1], RIGHT[:1]), key=lambda made: made[0][1].hash)
    assert machine.head.hash == best[0][1].hash
    final = certify(rest[0][1], [0, 1, 2], final=True)
    found = adopted(show(machine, [final]))
    assert [effect.head.hash for effect in found] == [rest[0][1].hash, final[1].hash]
    assert [effect.before.hash for effect in found if effect.before] == [START.hash, rest[0][1].hash]
    assert found[0].abandoned == (best[0][1].hash,)
    assert found[1].abandoned == ()


def test_what_is_served_afterwards_is_of_the_new_chain_alone() -> None:
    machine = machine_at(LEFT[1][1])  # restarted there: its certificates are on disk
    final = certify(RIGHT[2][1], [0, 1, 2], final=True)
    found = adopted(show(machine, [*RIGHT, final]))
    assert [effect.head.hash for effect in found] == hashes([*RIGHT, final])
    assert found[0].abandoned == tuple(hashes(LEFT))
    ask = TipAsk(START.epoch, START.round + 1, START.round, START.hash)
    effects = machine.handle(fx.Received(sender=OTHER, data=encode(ask)), 1_000)
    sent = [effect.data for effect in effects if isinstance(effect, fx.Send)]
    assert [encode(certificate) for certificate, _ in [*RIGHT, final]] == [
        data for data in sent if data in {encode(certificate) for certificate, _ in [*LEFT, *RIGHT, final]}
    ]
    assert not [effect for effect in effects if isinstance(effect, fx.Serve)]


def test_a_branch_that_was_left_after_a_restart_can_be_gone_back_to_once_it_is_shown_again() -> None:
    machine = machine_at(LEFT[1][1])
    better = [certify(START, [0, 2])]
    better.append(certify(better[0][1], [1, 2]))  # three voters in its sides
    show(machine, better)
    assert machine.head.hash == better[1][1].hash
    best = [certify(LEFT[1][1], [1, 2], trained=True)]  # three voters, and tokens
    show(machine, best)
    assert machine.head.hash == better[1][1].hash  # what leads there is on disk alone
    found = adopted(show(machine, LEFT))
    assert [effect.head.hash for effect in found] == hashes([*LEFT, *best])
    assert found[0].abandoned == tuple(hashes(better))
    assert machine.head.hash == best[0][1].hash
