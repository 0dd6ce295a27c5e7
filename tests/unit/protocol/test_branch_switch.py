"""A machine goes from one tentative branch to another: what its chain has then, and what it asks for."""

from spes_p2p.crypto import Identity, verify
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.branches import fork_order
from spes_p2p.protocol.codec import cut_hash, decode, encode
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import Message, TipAsk
from spes_p2p.protocol.recovery import recover, sign_recovery
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.transition import advance, make_body
from spes_p2p.testing.protocol_cases import alive_of, certificate_on, cut_of, identities, item_of, owned_head

PEERS = identities(4)
HEAD = owned_head(PEERS)
KEY = next(peer for peer in PEERS if peer.peer_id == HEAD.run.manifest.recovery_key)


def made(head: Head, *side: int) -> tuple[Certificate, Head]:
    """A round in which all of a side were alive; without a side a final one."""
    chosen = [PEERS[place] for place in side or range(4)]
    terms = Terms(head, tuple(peer.peer_id for peer in chosen) if side else ())
    cut, items = cut_of(head, [item_of(alive_of(head, peer)) for peer in chosen])
    body = make_body(terms, advance(terms, cut_hash(cut), items, verify), (None,) * 4, b"")
    return certificate_on(terms, body, chosen), next_head(head, body)


OWN, OTHER = sorted((made(HEAD, 0, 1), made(HEAD, 2, 3)), key=lambda one: fork_order(one[1]))
"""Two branches of one round: the fork choice prefers the first."""


def machine_at(head: Head) -> RoundMachine:
    machine = RoundMachine(head, PEERS[0], verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
    machine.start(0)
    machine.handle(fx.StateReady(round=head.round + 1), 0)
    return machine


def hears(machine: RoundMachine, message: Message, sender: Identity, now_ms: int) -> list[fx.Effect]:
    return machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms)


def adopted(effects: list[fx.Effect]) -> list[tuple[Head, tuple[bytes, ...]]]:
    return [(effect.head, effect.abandoned) for effect in effects if isinstance(effect, fx.Adopt)]


def asks(effects: list[fx.Effect]) -> set[tuple[bytes, TipAsk]]:
    sent = [(effect.to, decode(effect.data)) for effect in effects if isinstance(effect, fx.Send)]
    return {(to, message) for to, message in sent if isinstance(message, TipAsk)}


def on_two_branches() -> RoundMachine:
    machine = machine_at(HEAD)
    hears(machine, OWN[0], PEERS[1], 1)
    hears(machine, OTHER[0], PEERS[2], 2)
    assert machine.head == OWN[1]
    return machine


def test_with_a_final_certificate_of_another_branch_come_the_tentative_ones_that_it_builds_on() -> None:
    machine = on_two_branches()
    certificate, final = made(OTHER[1])
    effects = hears(machine, certificate, PEERS[3], 3)
    assert adopted(effects) == [(OTHER[1], (OWN[1].hash,)), (final, ())]
    behind = TipAsk(HEAD.epoch, 2, HEAD.round, HEAD.hash)
    shown = [decode(effect.data) for effect in hears(machine, behind, PEERS[1], 4) if isinstance(effect, fx.Send)]
    assert [message for message in shown if isinstance(message, Certificate)] == [OTHER[0], certificate]


def test_so_do_those_that_a_recovery_builds_on() -> None:
    machine = on_two_branches()
    body = recover(Terms(OTHER[1]), [peer.peer_id for peer in PEERS[:3]])
    effects = hears(machine, sign_recovery(body, KEY), PEERS[3], 3)
    assert adopted(effects) == [(OTHER[1], (OWN[1].hash,)), (next_head(OTHER[1], body), ())]


def test_a_branch_that_was_left_after_a_restart_is_asked_for_again_and_taken() -> None:
    machine = machine_at(OWN[1])  # restarted: it has the head, and the certificate is in its ledger only
    for at, certificate in enumerate((OTHER[0], made(OTHER[1], 0, 2)[0]), start=1):
        hears(machine, certificate, PEERS[2], at)
    assert machine.head == made(OTHER[1], 0, 2)[1]  # three voters in its sides
    more, tip = made(OWN[1], 0, 2)
    last, best = made(tip, 1, 3)  # four voters in its sides
    hears(machine, more, PEERS[1], 3)
    ask = TipAsk(HEAD.epoch, 2, HEAD.round, HEAD.hash)
    assert asks(hears(machine, last, PEERS[1], 2_000)) >= {(peer.peer_id, ask) for peer in PEERS[2:]}
    assert machine.head != best
    hears(machine, OWN[0], PEERS[1], 2_001)
    assert machine.head == best


def test_what_a_restarted_peer_is_shown_of_its_own_branch_changes_nothing() -> None:
    machine = machine_at(OWN[1])
    assert adopted(hears(machine, OWN[0], PEERS[1], 1)) == []
    assert machine.head == OWN[1]
