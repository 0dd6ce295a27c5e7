"""What a peer says and does when a round opens: alive, a claim, a leave; it trains, or asks to join."""

from __future__ import annotations

from typing import cast

from spes_p2p.protocol.effects import Train
from spes_p2p.protocol.leaving import Leaving
from spes_p2p.protocol.messages import Alive, Claim, Join, Leave
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.roster import admitted
from spes_p2p.protocol.wishes import Wishes


def greet(open_round: OpenRound, wishes: Wishes, leaving: Leaving | None, *, finished: bool) -> None:
    """Greet the round that has opened. `finished`: this peer has stopped for good and serves on."""
    context = open_round.context
    head = context.terms.head
    if not context.is_member:
        return
    trains = context.terms.round > 1 and not finished and leaving is None
    trains = trains and context.promised("alive-no-more") is None  # said before a restart
    open_round.will_train = trains
    open_round.updates.accuse_again()
    if leaving is not None:
        say_leave(open_round, leaving)
    elif not finished:
        _say_claim(open_round, wishes)
    if not finished:
        slot = "alive" if trains else "alive-no-more"
        alive = Alive(head.run.run_id, head.epoch, context.terms.round, trains)
        open_round.say(context.sign_once(slot, alive))


def begin(open_round: OpenRound, wishes: Wishes, *, stays: bool) -> None:
    """The state that the round begins from is on disk. `stays`: this peer neither leaves nor has stopped for good."""
    context = open_round.context
    if context.state_ready:
        return
    context.state_ready = True
    if not context.is_member:
        if stays:
            say_join(open_round, wishes)
        return
    resumed = open_round.resume_update()  # whether or not it trains again
    if open_round.will_train and not resumed:
        head = context.terms.head
        context.emit(Train(round=context.terms.round, inner_steps=head.inner_steps, base=head.hash))
        open_round.training = True


def _say_claim(open_round: OpenRound, wishes: Wishes) -> None:
    """Claim a shard while there is room here and one is vacant, or none is owned; state the capacity.

    A peer whose training is held states no capacity, so that nothing falls to it, not what it owned before either. In
    round 1 a claim is the sign of life.
    """
    context = open_round.context
    head, state = context.terms.head, context.terms.head.state
    row = state.row(context.me)
    owned = len(state.shards_of(context.me))
    vacant = any(not lease.owners for lease in state.leases)
    capacity = wishes.room if context.terms.round > 1 else wishes.capacity
    wants = owned < capacity and (vacant or owned == 0)
    if row is not None and (wants or row.capacity != capacity):
        body = Claim(head.run.run_id, head.epoch, context.terms.round, capacity)
        open_round.say(context.sign_once("claim", body))


def say_join(open_round: OpenRound, wishes: Wishes) -> None:
    """Ask to be a member: the state of a certificate at most one round old is on disk."""
    context = open_round.context
    head = context.terms.head
    body = Join(
        head.run.run_id,
        head.epoch,
        context.terms.round,
        wishes.capacity,
        wishes.invite_signature,
        wishes.sponsor,
        wishes.sponsor_signature,
    )
    if not admitted(head.run, context.me, body, context.verifier):
        text = f"this run ({head.run.config.protocol.admission}) does not admit this node: its link lets nobody in"
        context.notify(text, "error")
        return
    open_round.say(context.sign_once("join", body))


def say_leave(open_round: OpenRound, leaving: Leaving) -> None:
    """Say that this peer leaves, until a certificate lets it go."""
    context = open_round.context
    if not context.is_member:
        leaving.done = True
        return
    head = context.terms.head
    body = Leave(head.run.run_id, head.epoch, context.terms.round, leaving.handover, leaving.handover_bytes)
    signed = context.sign_once("leave", body)
    leaving.handover = cast(Leave, signed.body).handover  # what was promised first counts
    open_round.say(signed)
