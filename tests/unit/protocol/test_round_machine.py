from collections.abc import Iterable

import pytest

from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import decode, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Alive, Claim, Join, Leave, Manifest, Message, Signed, SignedRun, TipAsk
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.protocol_cases import (
    alive_of,
    body_of,
    certificate_of,
    claim_of,
    genesis_of,
    identities,
    item_of,
    owned_head,
    pieces_of,
    quick_config,
    trained_items,
    transition_of,
    update_of,
)
from spes_p2p.testing.swarm import identity_of

PEERS = identities(4)
HEAD = owned_head(PEERS)
ME, OTHER = PEERS[0], PEERS[1]
NEXT = certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, trained_items(HEAD, PEERS))), PEERS)


def machine_at(head: Head = HEAD, me: Identity = ME, **changes: object) -> RoundMachine:
    wishes = Wishes(capacity=2, private_seed=b"mine", **changes)
    return RoundMachine(head, me, verify, wishes, now_ms=0)


def messages(effects: Iterable[fx.Effect]) -> list[Message]:
    found = {effect.data: decode(effect.data) for effect in effects if isinstance(effect, fx.Send)}
    return list(found.values())


def said(effects: Iterable[fx.Effect], kind: type) -> list[object]:
    return [m.body for m in messages(effects) if isinstance(m, Signed) and isinstance(m.body, kind)]


def hears(machine: RoundMachine, message: Message, sender: Identity = OTHER, now_ms: int = 1) -> list[fx.Effect]:
    return machine.handle(fx.Received(sender=sender.peer_id, data=encode(message)), now_ms)


def test_a_founder_greets_round_1_with_a_claim_and_trains_nothing() -> None:
    machine = machine_at(genesis_of(PEERS))
    effects = machine.start(0)
    assert [claim.capacity for claim in said(effects, Claim)] == [2]
    assert [alive.more for alive in said(effects, Alive)] == [False]
    assert not any(isinstance(e, fx.Train) for e in machine.handle(fx.StateReady(round=1), 1))


def test_a_member_says_that_it_is_alive_and_trains_once_the_state_is_here() -> None:
    machine = machine_at()
    assert [alive.more for alive in said(machine.start(0), Alive)] == [True]
    assert not any(isinstance(e, fx.Train) for e in machine.handle(fx.StateReady(round=1), 1))
    (train,) = [e for e in machine.handle(fx.StateReady(round=2), 2) if isinstance(e, fx.Train)]
    assert (train.round, train.inner_steps) == (2, 10)
    assert not any(isinstance(e, fx.Train) for e in machine.handle(fx.StateReady(round=2), 3))


def test_a_member_with_nothing_to_give_says_so() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    effects = machine.handle(fx.nothing_trained(2), 2)
    assert [alive.more for alive in said(effects, Alive)] == [False]
    assert said(effects, Manifest) == []


def test_everything_durable_comes_before_everything_that_leaves() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    trained = fx.Trained(round=2, tokens=9, steps=1, loss_micronats=1, pieces=pieces_of(HEAD, ME.peer_id))
    effects = machine.handle(trained, 2)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(fx.Send) > max(place for place, kind in enumerate(kinds) if kind is fx.Persist)
    assert any("signed/manifest/2" in key for e in effects if isinstance(e, fx.Persist) for key in e.entries)


def test_training_is_stopped_at_round_max() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    assert not any(isinstance(e, fx.StopTraining) for e in machine.handle(fx.Tick(), 39_999))
    assert [e.round for e in machine.handle(fx.Tick(), 40_000) if isinstance(e, fx.StopTraining)] == [2]
    assert not any(isinstance(e, fx.StopTraining) for e in machine.handle(fx.Tick(), 50_000))


def test_training_is_stopped_the_grace_after_half_of_the_members_have_published() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    for number, peer in enumerate(PEERS[1:3]):
        hears(machine, update_of(HEAD, peer), peer, 1_000 * (number + 1))
    assert not any(isinstance(e, fx.StopTraining) for e in machine.handle(fx.Tick(), 6_999))
    assert any(isinstance(e, fx.StopTraining) for e in machine.handle(fx.Tick(), 7_000))


def test_a_finished_member_serves_and_says_nothing_of_its_own() -> None:
    machine = machine_at(stop_after_round=1)
    effects = machine.start(0)
    assert said(effects, Alive) == said(effects, Claim) == []
    assert not any(isinstance(e, fx.Train) for e in machine.handle(fx.StateReady(round=2), 1))


# --- certificates ----------------------------------------------------------------------------------------------------


def test_a_certificate_is_adopted_whoever_sends_it() -> None:
    machine = machine_at()
    machine.start(0)
    (adopt,) = [e for e in hears(machine, NEXT, identity_of("anybody")) if isinstance(e, fx.Adopt)]
    assert (adopt.head.round, machine.head.round, machine.terms.round) == (2, 2, 3)
    assert adopt.certificate == NEXT
    assert [e for e in hears(machine, NEXT) if isinstance(e, fx.Adopt)] == []


def test_a_false_certificate_changes_nothing() -> None:
    machine = machine_at()
    machine.start(0)
    false = certificate_of(HEAD, body_of(HEAD, transition_of(HEAD, [])), PEERS[:2])
    with pytest.raises(RemoteProtocolError, match="3 make a quorum"):
        hears(machine, false)
    assert machine.head == HEAD


def test_the_chain_is_followed_through_certificates_that_came_in_the_wrong_order() -> None:
    machine = machine_at()
    machine.start(0)
    middle = machine_at()
    middle.start(0)
    hears(middle, NEXT)
    after = middle.head
    second = certificate_of(after, body_of(after, transition_of(after, [item_of(alive_of(after, OTHER))])), PEERS)
    asked = [m for m in messages(hears(machine, second)) if isinstance(m, TipAsk)]
    assert asked == [TipAsk(0, 2, 1, HEAD.hash)]
    effects = hears(machine, NEXT, now_ms=2)
    assert [e.head.round for e in effects if isinstance(e, fx.Adopt)] == [2, 3]


def test_an_older_round_is_answered_with_its_certificate_and_not_at_every_message() -> None:
    machine = machine_at()
    machine.start(0)
    hears(machine, NEXT)
    assert [m for m in messages(hears(machine, TipAsk(0, 2), now_ms=5)) if isinstance(m, Certificate)] == [NEXT]
    assert messages(hears(machine, TipAsk(0, 2), now_ms=6)) == []
    assert NEXT in messages(hears(machine, TipAsk(0, 2), now_ms=2_000))


def test_what_is_no_longer_in_memory_is_served_from_the_ledger() -> None:
    machine = machine_at()
    machine.start(0)
    assert fx.Serve(to=OTHER.peer_id, round=0) in hears(machine, TipAsk(0, 0))


def test_messages_of_the_next_round_count_when_it_opens() -> None:
    machine, ahead = machine_at(), machine_at()
    for each in (machine, ahead):
        each.start(0)
    hears(ahead, NEXT)
    hears(machine, claim_of(ahead.head, OTHER))
    hears(machine, NEXT, PEERS[2], 2)
    assert OTHER.peer_id in {peer for _, peer, _ in machine._round.updates.slots}


# --- hostile messages ------------------------------------------------------------------------------------------------


def test_garbage_and_messages_of_other_runs_are_refused_and_change_nothing() -> None:
    machine = machine_at()
    machine.start(0)
    foreign = owned_head(PEERS, quick_config(resend_ms=999))
    run = SignedRun(HEAD.run.manifest, bytes(64))
    for message in (alive_of(foreign, OTHER), update_of(foreign, OTHER), run):
        with pytest.raises(RemoteProtocolError):
            hears(machine, message)
    for data in (b"", b"\x00" * 100, b"\x93\xa4cert"):
        with pytest.raises(RemoteProtocolError):
            machine.handle(fx.Received(sender=OTHER.peer_id, data=data), 2)
    assert list(machine._round.updates.slots) == [(ItemKind.ALIVE, ME.peer_id, 0)]


def test_time_does_not_go_back() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.Tick(), 10)
    with pytest.raises(LocalProtocolError, match="time went back"):
        machine.handle(fx.Tick(), 9)


def test_after_a_tick_at_its_deadline_the_next_deadline_is_later() -> None:
    machine, now_ms = machine_at(), 0
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    for _ in range(400):
        due_ms = machine.deadline_ms()
        assert due_ms is not None
        now_ms = max(1, due_ms)
        machine.handle(fx.Tick(), now_ms)
        after_ms = machine.deadline_ms()
        assert after_ms is not None
        assert after_ms > now_ms
    assert now_ms > 100_000


def test_what_is_due_is_done_even_if_the_shell_never_finds_time_for_a_tick() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    effects = hears(machine, alive_of(HEAD, OTHER), now_ms=400_000)
    assert any(isinstance(e, fx.StopTraining) for e in effects)
    assert any(isinstance(m, TipAsk) for m in messages(effects))


def test_a_settled_member_asks_for_no_tips_while_its_round_may_still_be_on_time() -> None:
    machine = machine_at()
    machine.start(0)
    machine.handle(fx.StateReady(round=2), 1)
    effects = hears(machine, alive_of(HEAD, OTHER), now_ms=40_000)
    assert not any(isinstance(m, TipAsk) for m in messages(effects))


# --- joining and leaving ---------------------------------------------------------------------------------------------


def test_a_stranger_asks_for_the_tip_loads_the_state_and_then_asks_to_join() -> None:
    x, invite = identity_of("x"), identity_of("invite")
    signature = invite.sign("invite", invite_payload(HEAD.run.run_id, x.peer_id))
    machine = machine_at(me=x, invite_signature=signature)
    assert messages(machine.start(0)) == []
    asked = [e.to for e in machine.handle(fx.Tick(), 0) if isinstance(e, fx.Send)]
    assert len(asked) == 3
    effects = machine.handle(fx.StateReady(round=2), 5)
    assert [join.round for join in said(effects, Join)] == [2]


def test_a_stranger_without_an_invitation_is_told_and_asks_nobody() -> None:
    machine = machine_at(me=identity_of("x"))
    machine.start(0)
    effects = machine.handle(fx.StateReady(round=2), 5)
    assert said(effects, Join) == []
    assert ["does not admit this node" in e.text for e in effects if isinstance(e, fx.Notify)] == [True]


def test_a_leave_is_said_again_until_it_is_certified() -> None:
    machine = machine_at()
    machine.start(0)
    effects = machine.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 1)
    assert [leave.round for leave in said(effects, Leave)] == [2]
    effects = hears(machine, NEXT, now_ms=2)
    assert [leave.round for leave in said(effects, Leave)] == [3]
    assert not any(isinstance(e, fx.Left) for e in effects)


def test_one_that_is_no_member_has_left_at_once_and_says_so_once() -> None:
    machine = machine_at(me=identity_of("x"))
    machine.start(0)
    effects = machine.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 1)
    assert sum(isinstance(e, fx.Left) for e in effects) == 1
    assert not any(isinstance(e, fx.Left) for e in machine.handle(fx.Tick(), 2))
