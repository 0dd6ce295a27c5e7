from dataclasses import replace

import msgspec
import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.ids import PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import decode, encode
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import HalfIn, Manifest, Message, Signed, TipAsk
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.state import RosterRow
from spes_p2p.testing.protocol_cases import identities, owned_head, pieces_of, update_of
from spes_p2p.testing.swarm import identity_of

FOUNDERS = identities(4)
CROWD = [identity_of(f"member {number}") for number in range(70)]
SMALL = owned_head(FOUNDERS)


def with_members(members: list[Identity]) -> Head:
    rows = [RosterRow(member.peer_id, 0, 0, 0, 1, None) for member in members]
    roster = tuple(sorted([*SMALL.state.roster, *rows], key=lambda row: row.peer))
    return replace(SMALL, state=msgspec.structs.replace(SMALL.state, roster=roster))


LARGE = with_members(CROWD)
TERMS = Terms(LARGE)
VOTERS = {founder.peer_id: founder for founder in FOUNDERS}
LEADERS = [VOTERS[peer] for peer in TERMS.leaders]


def training(me: Identity, head: Head = LARGE) -> RoundMachine:
    machine = RoundMachine(head, me, verify, Wishes(capacity=0, private_seed=b"mine"), now_ms=0)
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    return machine


def sent(effects: list[fx.Effect], kind: type) -> list[tuple[PeerId, Message]]:
    found = [(effect.to, decode(effect.data)) for effect in effects if isinstance(effect, fx.Send)]
    return [(to, message) for to, message in found if isinstance(message, kind)]


def hears(machine: RoundMachine, message: Message, sender: Identity, now_ms: int = 2) -> list[fx.Effect]:
    return machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms)


def half_in(machine: RoundMachine) -> list[fx.Effect]:
    """Manifests of half of the members come in."""
    return [effect for peer in CROWD[:37] for effect in hears(machine, update_of(LARGE, peer), peer)]


def stops(machine: RoundMachine, now_ms: int) -> bool:
    return any(isinstance(effect, fx.StopTraining) for effect in machine.handle(fx.Tick(), now_ms))


@pytest.mark.parametrize(("num_others", "hear_all"), [(60, True), (61, False)])
def test_up_to_64_members_everybody_hears_everybody(num_others: int, hear_all: bool) -> None:
    terms = Terms(with_members(CROWD[:num_others]))
    assert terms.audience == (terms.members if hear_all else terms.eligible)


def test_in_a_large_run_an_update_goes_to_the_eligible_only() -> None:
    machine = training(CROWD[0])
    pieces = pieces_of(LARGE, CROWD[0].peer_id)
    effects = machine.handle(fx.Trained(round=2, tokens=1, steps=1, loss_micronats=1, pieces=pieces), 2)
    manifests = [to for to, signed in sent(effects, Signed) if isinstance(signed.body, Manifest)]
    assert manifests == list(TERMS.eligible) == sorted(VOTERS)


def test_the_first_leaders_tell_the_others_when_half_of_the_manifests_are_in() -> None:
    assert TERMS.criers == TERMS.leaders[:3]
    told = sent(half_in(training(LEADERS[0])), HalfIn)
    assert sorted(to for to, _ in told) == sorted(member.peer_id for member in CROWD)
    assert {message for _, message in told} == {HalfIn(0, 2)}
    assert sent(half_in(training(LEADERS[3])), HalfIn) == []


def test_training_stops_the_grace_after_one_voter_more_than_may_lie_said_that_half_is_in() -> None:
    machine = training(CROWD[0])
    for peer in (LEADERS[0], LEADERS[0], CROWD[1]):
        hears(machine, HalfIn(0, 2), peer, 10)
    assert not stops(machine, 10_000)
    hears(machine, HalfIn(0, 2), LEADERS[1], 10_000)
    assert not stops(machine, 14_999)
    assert stops(machine, 15_000)


def test_who_gets_the_manifests_believes_nobodys_word_for_them() -> None:
    machine = training(LEADERS[3])
    for peer in LEADERS[:3]:
        hears(machine, HalfIn(0, 2), peer, 10)
    assert machine._round.updates.half_at_ms is None


def test_a_member_that_came_back_is_told_that_half_is_in() -> None:
    machine = training(LEADERS[3])
    assert sent(hears(machine, TipAsk(0, 2), CROWD[60]), object) == []
    half_in(machine)
    effects = hears(machine, TipAsk(0, 2), CROWD[60], 2_000)
    assert (CROWD[60].peer_id, HalfIn(0, 2)) in sent(effects, object)
