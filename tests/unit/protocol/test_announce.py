from spes_p2p.crypto import Identity, verify
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.announce import CertificatePull
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import body_hash, decode, encode
from spes_p2p.protocol.messages import Decided, Message, TipAsk
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    identities,
    owned_head,
    trained_items,
    transition_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ME, OTHER, THIRD = PEERS[0], PEERS[1], PEERS[2]
ASK = TipAsk(0, 2, 1, HEAD.hash)
NEXT = certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, trained_items(HEAD, PEERS))), PEERS)
DECIDED = Decided(0, 2, body_hash(NEXT.body))
PAUSE_MS = 250
"""A quarter of the resend."""


def settled(me: Identity = ME) -> RoundMachine:
    """A machine in round 2, at 1 ms, that has asked for tips already."""
    machine = RoundMachine(HEAD, me, verify, Wishes(capacity=2, private_seed=b"mine"), now_ms=0)
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    return machine


def sent(effects: list[fx.Effect]) -> list[tuple[PeerId, Message]]:
    return [(effect.to, decode(effect.data)) for effect in effects if isinstance(effect, fx.Send)]


def hears(machine: RoundMachine, message: Message, sender: Identity, now_ms: int) -> list[tuple[PeerId, Message]]:
    return sent(machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms))


def asked(machine: RoundMachine, now_ms: int) -> list[PeerId]:
    return [to for to, message in sent(machine.handle(fx.Tick(), now_ms)) if message == ASK]


def test_a_voter_announces_what_it_adopts_to_the_voters_and_sends_the_certificate_to_who_asks() -> None:
    machine = settled()
    told = hears(machine, NEXT, OTHER, 2)
    assert [to for to, message in told if message == DECIDED] == [peer.peer_id for peer in PEERS[1:]]
    assert not any(isinstance(message, Certificate) for _, message in told)
    assert hears(machine, TipAsk(0, 2), THIRD, 3) == [(THIRD.peer_id, NEXT)]


def test_a_voter_waits_a_quarter_of_the_resend_for_the_votes_before_it_asks_for_the_certificate() -> None:
    machine = settled()
    assert hears(machine, DECIDED, OTHER, 10) == []
    assert asked(machine, 9 + PAUSE_MS) == []
    assert machine.deadline_ms() == 10 + PAUSE_MS
    assert asked(machine, 10 + PAUSE_MS) == [OTHER.peer_id]


def test_who_does_not_vote_asks_at_once() -> None:
    joiner = identity_of("joiner")
    machine = settled(joiner)
    assert (OTHER.peer_id, ASK) in hears(machine, DECIDED, OTHER, 10)


def test_one_peer_is_asked_at_a_time_and_the_next_after_each_resend() -> None:
    machine = settled()
    for at, peer in enumerate((OTHER, THIRD)):
        hears(machine, DECIDED, peer, 10 + at)
        hears(machine, DECIDED, peer, 10 + at)
    times = [10 + PAUSE_MS + 1_000 * turn for turn in range(3)]
    assert [asked(machine, at) for at in times] == [[OTHER.peer_id], [THIRD.peer_id], [OTHER.peer_id]]


def test_a_message_of_the_next_round_announces_the_certificate_too() -> None:
    machine, ahead = settled(), settled(OTHER)
    hears(ahead, NEXT, THIRD, 2)
    hears(machine, alive_of(ahead.head, OTHER), OTHER, 10)
    assert asked(machine, 10 + PAUSE_MS) == [OTHER.peer_id]


def test_an_older_round_is_answered_with_an_announcement_once_per_resend() -> None:
    machine = settled()
    hears(machine, NEXT, OTHER, 2)
    late = alive_of(HEAD, THIRD)
    assert [hears(machine, late, THIRD, at) for at in (3, 4)] == [[(THIRD.peer_id, DECIDED)], []]
    assert (THIRD.peer_id, DECIDED) in hears(machine, late, THIRD, 1_003)


def test_an_announcement_of_an_older_round_is_not_answered() -> None:
    machine = settled()
    hears(machine, NEXT, OTHER, 2)
    assert hears(machine, DECIDED, THIRD, 3) == []


def test_the_word_of_strangers_is_taken_up_to_a_number_and_members_are_asked_as_often() -> None:
    pull, strangers = CertificatePull(1_000), [PeerId(number.to_bytes(32, "big")) for number in range(200)]
    for stranger in strangers:
        pull.told(stranger, 0, is_member=False, may_decide=False)
    assert [pull.next(1_000 * turn) for turn in range(65)] == [*strangers[:64], strangers[0]]
    for member in (OTHER.peer_id, THIRD.peer_id):
        pull.told(member, 65_000, is_member=True, may_decide=False)
    asked = [pull.next(65_000 + 1_000 * turn) for turn in range(5)]
    assert [peer for peer in asked if peer not in strangers] in (
        [OTHER.peer_id, THIRD.peer_id],
        [THIRD.peer_id, OTHER.peer_id],
    )
