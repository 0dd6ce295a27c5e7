"""How far the open round is, for people: a view of the machine that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spes_p2p.ids import PeerId
from spes_p2p.protocol.leaving import Leaving
from spes_p2p.protocol.rescue import Outlook, Rescue
from spes_p2p.protocol.wire import ItemKind, Step

if TYPE_CHECKING:
    from spes_p2p.protocol.open_round import OpenRound
    from spes_p2p.protocol.siding import Siding

PhaseName = Literal["join", "load", "train", "publish", "acknowledge", "aggregate", "vote", "finished"]

_UPDATES = "updates of the other members"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at the open round."""

    round: int
    phase: PhaseName
    view: int
    leader: PeerId | None
    elapsed_ms: int
    time_left_ms: int | None
    manifests: int
    receipts: int
    live: int
    parts_done: int
    parts: int
    votes: int
    votes_needed: int
    own_acks: int
    own_acks_needed: int
    waiting_for: str
    missing: tuple[PeerId, ...]
    """Live members whose update is what is waited for, sorted; empty while it is something else."""
    final_round: int = 0
    """Of the last final certificate."""
    tentative: bool = False
    """Whether the tip, or the certificate that is being made, is tentative."""
    waiting: str = ""
    """Why the run cannot go on, not even tentatively; empty: it can."""
    let_go_ms: int | None = None
    """Since a certificate let this peer leave; None: none has."""
    successors: tuple[int, int] = (0, 0)
    """(have not fetched yet what this peer handed over, all of them)."""
    recovery: Outlook | None = None
    """What a recovery by this peer would do; None: it holds no key, or the run can go on."""


def progress_of(
    round_: OpenRound,
    leaving: Leaving | None,
    finished: bool,
    now_ms: int,
    siding: Siding | None = None,
    rescue: Rescue | None = None,
) -> Progress:
    """Look at a round, and at who is heard, if that matters."""
    context, updates, voting = round_.context, round_.updates, round_.voting
    terms = context.terms
    view = max(voting.view, 0)
    cut = round_.leader.cut_of_view(voting.view) if voting.view >= 0 else None
    manifests = updates.manifests()
    own = updates.slots.get((ItemKind.UPDATE, context.me, terms.round))
    transition = cut.transition if cut is not None else None
    parts_done = (
        sum(round_.parts.result(transition.updates_hash, part) is not None for part in range(len(terms.aggregators)))
        if transition is not None
        else 0
    )
    prevotes, precommits = (len(voting.votes[step].get(view, {})) for step in (Step.PREVOTE, Step.PRECOMMIT))
    phase, waiting = _phase(round_, finished)
    if leaving is not None:
        gone = "the new owners of its shards to fetch them" if not context.is_member else waiting
        waiting = gone or "the certificate that lets this node leave"
    deadline = voting.deadline_ms() if phase in ("aggregate", "vote", "acknowledge") else None
    return Progress(
        round=terms.round,
        phase=phase,
        view=view,
        leader=terms.leader(view) if terms.voters else None,
        elapsed_ms=now_ms - context.opened_at_ms,
        time_left_ms=None if deadline is None else max(0, deadline - now_ms),
        manifests=len(manifests),
        receipts=sum(held.receipt is not None for held in manifests),
        live=len(terms.live),
        parts_done=parts_done,
        parts=len(terms.aggregators),
        votes=precommits or prevotes,
        votes_needed=terms.quorum,
        own_acks=len(own.acks) if own else 0,
        own_acks_needed=max(terms.expert_acks, terms.psi_acks),
        waiting_for=waiting,
        missing=tuple(peer for peer in sorted(terms.live) if not updates.is_in(peer)) if waiting == _UPDATES else (),
        final_round=terms.head.last_final.round,
        tentative=terms.tentative or not terms.head.is_final,
        waiting=siding.halted if siding else "",
        let_go_ms=now_ms - leaving.certified_at_ms if leaving and leaving.certified_at_ms is not None else None,
        successors=(len(leaving.successors), leaving.num_successors) if leaving else (0, 0),
        recovery=rescue.outlook(context, siding.heard(terms), now_ms) if siding and rescue else None,
    )


def _phase(round_: OpenRound, finished: bool) -> tuple[PhaseName, str]:
    context, voting = round_.context, round_.voting
    if finished:
        return "finished", ""
    if not context.state_ready:
        return "load", "the state of the run"
    if not context.is_member:
        return "join", "the members to let this node in"
    if round_.training:
        return "train", ""
    own = round_.updates.slots.get((ItemKind.UPDATE, context.me, context.terms.round))
    if own is not None and own.receipt is None:
        return "publish", "acknowledgements of this node's update"
    if voting.view < 0:
        return "acknowledge", _UPDATES
    if voting.view in voting.proposals:
        return "vote", "votes"
    if voting.view in round_.cuts.announced:
        return "aggregate", "the averages of the shared modules"
    return "acknowledge", "the leader's cut"
