"""The wish to leave outlives a restart, and what remains of it can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.crypto import verify
from spes_p2p.errors import MachineError
from spes_p2p.node import leaving
from spes_p2p.node.leaving import LeaveStage, LeaveWish, leave_view
from spes_p2p.node.pausing import Pace
from spes_p2p.node.snapshot import LeaveView
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.messages import HandoverDone
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.testing import protocol_cases as cases


async def test_wish_is_there_for_the_next_start_until_it_is_done(tmp_path: Path) -> None:
    wish = LeaveWish(tmp_path)
    assert not wish.is_stored
    wish.want()
    assert wish.wanted.is_set()
    again = LeaveWish(tmp_path)
    assert again.is_stored
    assert not again.wanted.is_set()
    again.forget()
    again.forget()
    assert not LeaveWish(tmp_path).is_stored


async def test_wish_that_cannot_be_stored_holds_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MachineError("disk full")

    monkeypatch.setattr(leaving, "write_file", full)
    wish = LeaveWish(tmp_path)
    with pytest.raises(MachineError):
        wish.want()
    assert wish.wanted.is_set()


PEERS = cases.identities(4)
HEAD = cases.owned_head(PEERS, capacity=4)  # whoever stays has room for what a leaver owned
RATE = HEAD.run.config.protocol.min_rate_bytes_per_s


class Leaver:
    """A machine that leaves, and what its node shows of that."""

    def __init__(self, tmp_path: Path) -> None:
        self.machine = RoundMachine(HEAD, PEERS[0], verify, Wishes(capacity=2, private_seed=b"x"), now_ms=0)
        self.machine.start(0)
        self.machine.handle(fx.StateReady(round=2), 0)
        self.wish = LeaveWish(tmp_path)
        self.wish.want()
        self.pace = Pace()
        for at_ms in (0, 40_000):
            self.pace.adopted(at_ms)

    def view(self, now_ms: int, *, has_left: bool = False) -> LeaveView:
        progress = self.machine.progress(now_ms)
        return leave_view(self.wish, self.machine.head, progress, self.pace, has_left=has_left)

    def steps(self, now_ms: int) -> list[str]:
        return [step.name for step in self.view(now_ms).steps]

    def say(self, handover_bytes: int) -> None:
        self.wish.stage, self.wish.handover_bytes = LeaveStage.SAID, handover_bytes
        self.machine.handle(fx.nothing_trained(2), 1)
        self.machine.handle(fx.LeaveWanted(handover=b"h" * 32, handover_bytes=9), 1)

    def let_go(self, now_ms: int) -> list[fx.Effect]:
        leave = next(
            held.signed for held in self.machine._round.updates.slots.values() if held.signed.body.tag == "leave"
        )
        items = [cases.item_of(leave), *(cases.item_of(cases.alive_of(HEAD, peer)) for peer in PEERS[1:])]
        body = cases.body_of(HEAD, cases.transition_of(HEAD, items))
        data = encode(cases.certificate_of(HEAD, body, PEERS))
        return self.machine.handle(fx.Received(sender=PEERS[1].peer_id, data=data), now_ms)


async def test_what_remains_of_a_leave_shrinks_step_by_step(tmp_path: Path) -> None:
    leaver = Leaver(tmp_path)
    assert leaver.steps(0) == ["finish", "hand over", "certificate", "successors"]
    leaver.wish.stage = LeaveStage.HAND_OVER
    assert leaver.steps(0) == ["hand over", "certificate", "successors"]
    leaver.say(handover_bytes=10 * RATE)
    assert leaver.steps(1) == ["certificate", "successors"]
    assert leaver.view(30_000).safe_in_ms == 10_000 + 12_000  # the rest of the round, then ten seconds of bytes
    assert not leaver.view(30_000).safe_to_close

    leaver.let_go(40_000)
    (step,) = leaver.view(41_000).steps
    heirs = {
        owner for shard in HEAD.state.shards_of(PEERS[0].peer_id) for owner in leaver.machine.head.state.owners(shard)
    }
    assert (step.name, step.text) == (
        "successors",
        f"the new owners fetch what is handed over (0 of {len(heirs)} have)",
    )
    assert heirs
    assert leaver.view(41_000).safe_in_ms == 11_000

    done: list[fx.Effect] = []
    for heir in heirs:
        data = encode(HandoverDone(2, b"h" * 32))
        done += leaver.machine.handle(fx.Received(sender=heir, data=data), 45_000)
    assert fx.Left() in done
    last = leaver.view(45_001, has_left=True)
    assert (last.safe_to_close, last.safe_in_ms, [step.name for step in last.steps]) == (True, 0, ["last messages"])


async def test_a_leave_without_a_hand_over_says_why_and_waits_for_nobody(tmp_path: Path) -> None:
    leaver = Leaver(tmp_path)
    leaver.wish.stage, leaver.wish.given_up = LeaveStage.SAID, "this month's 100 MB are used up"
    leaver.machine.handle(fx.nothing_trained(2), 1)
    leaver.machine.handle(fx.LeaveWanted(handover=None, handover_bytes=0), 1)
    (step,) = leaver.view(30_000).steps
    assert step.name == "certificate"
    assert step.text.endswith("nothing is handed over: this month's 100 MB are used up")
    assert leaver.view(30_000).safe_in_ms == 10_000
    assert fx.Left() in leaver.let_go(40_000)


async def test_successors_that_do_not_come_are_waited_for_no_longer_than_a_round(tmp_path: Path) -> None:
    leaver = Leaver(tmp_path)
    leaver.say(handover_bytes=RATE)
    leaver.let_go(40_000)
    longest_ms = HEAD.run.config.protocol.round_max_ms
    assert leaver.view(40_000 + longest_ms - 1_000).safe_in_ms == 1_000
    assert leaver.view(40_000 + longest_ms + 5).safe_in_ms == 0


async def test_leave_before_there_is_anything_to_leave_is_safe_at_once(tmp_path: Path) -> None:
    assert leave_view(LeaveWish(tmp_path), None, None, Pace(), has_left=False) == LeaveView(
        safe_in_ms=0, safe_to_close=True
    )


async def test_without_a_pace_nobody_guesses_when_it_is_safe(tmp_path: Path) -> None:
    leaver = Leaver(tmp_path)
    leaver.pace = Pace()
    assert leaver.view(0).safe_in_ms is None
