"""From the running node to a `NodeSnapshot`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from spes_p2p import __version__
from spes_p2p.ids import PeerId
from spes_p2p.node.driver import Driver
from spes_p2p.node.holds import Holds
from spes_p2p.node.lease_views import LeaseViews
from spes_p2p.node.lease_views import peer_words as _text
from spes_p2p.node.leaving import LeaveWish, leave_view
from spes_p2p.node.machine import MachineWatch
from spes_p2p.node.names import short_names
from spes_p2p.node.pausing import Pace
from spes_p2p.node.rates import Rates
from spes_p2p.node.snapshot import (
    PHASES,
    Counters,
    LearningView,
    LeaveView,
    LimitsView,
    NetworkView,
    NodeSnapshot,
    PauseView,
    PeerView,
    Phase,
    PhaseView,
    RecoveryView,
    RoundView,
    ShardView,
    UpdateView,
)
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.worker import Restarting, Worker
from spes_p2p.node.worker_messages import Progress as TrainProgress
from spes_p2p.protocol.progress import Progress

_CURVE_POINTS = 400
_UPDATES_SHOWN = 20


class Lines(Protocol):
    """What the view needs of the transport."""

    def bytes_sent(self) -> int:
        """Since the start."""
        ...

    def bytes_received(self) -> int:
        """Since the start."""
        ...

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a channel to or from the peer is open."""
        ...

    def latency_ms(self, peer: PeerId) -> float | None:
        """How fast it confirms a small message; None: not measured."""
        ...

    def route(self, peer: PeerId) -> str:
        """`tcp`, `quic`, `websocket` or `relayed`; empty: not known."""
        ...


@dataclass(slots=True)
class TrainerWatch:
    """Listens to the trainer process. Satisfies `worker.WorkerListener`."""

    notify: Callable[[str, str], None]
    latest: TrainProgress | None = None
    curve: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_CURVE_POINTS))
    restarts: int = 0

    def progress(self, progress: TrainProgress) -> None:
        """Training has moved on."""
        self.latest = progress
        if progress.loss == progress.loss:  # not NaN
            self.curve.append((progress.global_step, progress.loss))

    def restarting(self, event: Restarting) -> None:
        """The trainer process died."""
        self.restarts = event.restarts
        self.notify("error", f"the trainer process died and is started again: {event.reason}")


@dataclass(slots=True, kw_only=True)
class View:
    """Makes snapshots."""

    run_name: str
    run_id: str
    peer: PeerId
    machine: MachineWatch
    began_s: float
    transport: Lines
    addresses: tuple[str, ...]
    watch: TrainerWatch
    is_leaving: Callable[[], bool]
    """A leave was asked for, perhaps before the machine can be told."""
    wish: LeaveWish | None = None
    holds: Holds = field(default_factory=Holds)
    driver: Driver | None = None
    sync: StateSync | None = None
    worker: Worker | None = None
    holds_recovery_key: bool = False
    limits: Callable[[], LimitsView] = LimitsView
    waiting_for: str = ""
    """Before the machine runs: what the start waits for."""
    rates: Rates = field(default_factory=Rates)
    _round_began: tuple[int, int, int] = (0, 0, 0)
    """(round, bytes sent, bytes received) when the open round was first seen."""
    _leases: LeaseViews = field(init=False)

    def __post_init__(self) -> None:
        """What is made once per certificate."""
        self._leases = LeaseViews(self.peer)

    def snapshot(self, now_ms: int) -> NodeSnapshot:
        """One look."""
        driver, sync = self.driver, self.sync
        head = driver.machine.head if driver is not None else None
        progress = driver.machine.progress(now_ms) if driver is not None else None
        return NodeSnapshot(
            version=__version__,
            run_name=self.run_name,
            run_id=self.run_id,
            peer=_text(self.peer),
            started_ms_ago=int((time.monotonic() - self.began_s) * 1000),
            member=driver is not None and driver.machine.is_member,
            voter=head is not None and self.peer in head.state.voters,
            leaving=self.is_leaving(),
            paused=self.holds.held,
            pause=self._pause(now_ms),
            leave=self._leave(progress),
            certified_round=head.round if head is not None else 0,
            final_round=head.last_final.round if head is not None else 0,
            epoch=head.epoch if head is not None else 0,
            waiting=progress.waiting if progress is not None else "",
            holds_recovery_key=self.holds_recovery_key,
            recovery=_recovery(progress),
            psi_digest=head.psi_digest.hex() if head is not None else "",
            round=self._round(progress, sync),
            shards=self._shards(),
            learning=self._learning(),
            network=self._network(progress.round if progress is not None else 0),
            machine=msgspec.structs.replace(self.machine.latest, trainer_restarts=self.watch.restarts),
            counters=self._counters(),
            limits=self.limits(),
        )

    def _pause(self, now_ms: int) -> PauseView | None:
        if not self.holds.held:
            return None
        if self.driver is not None:
            return self.driver.pause()
        return PauseView(reasons=self.holds.reasons, since_ms=now_ms - (self.holds.since_ms or now_ms))

    def _leave(self, progress: Progress | None) -> LeaveView | None:
        if self.wish is None or not self.wish.wanted.is_set():
            return None
        if self.driver is None:
            return leave_view(self.wish, None, None, Pace(), has_left=False)
        head = self.driver.machine.head
        return leave_view(self.wish, head, progress, self.driver.pace, has_left=self.driver.has_left)

    def _round(self, progress: Progress | None, sync: StateSync | None) -> RoundView:
        if progress is None:
            return RoundView(number=0, phase="load", waiting_for=self.waiting_for)
        waiting, training = progress.waiting_for, self._training_now()
        if progress.phase == "load" and sync is not None and sync.blobs_missing:
            waiting = f"{sync.blobs_missing} blobs of the state"
        if progress.missing:
            waiting = f"updates of {short_names(progress.missing)}"
        if progress.phase == "train" and training is None:
            waiting = self._what_training_waits_for()
        if progress.phase == "join" and self.driver is not None and not self.driver.machine.head.is_final:
            waiting = "a final certificate: tentative ones let nobody in"
        if self.is_leaving() and self.driver is not None and not self.driver.machine.leaving:
            waiting = "the end of this round's training, then the leave"
        return RoundView(
            number=progress.round,
            phase=progress.phase,
            phases=_phases(progress, training),
            elapsed_ms=progress.elapsed_ms,
            time_left_ms=progress.time_left_ms,
            view=progress.view,
            leader=_text(progress.leader) if progress.leader is not None else "",
            votes=progress.votes,
            votes_needed=progress.votes_needed,
            waiting_for=waiting,
            last_parts=sync.num_parts[0] if sync is not None else 0,
            last_kept_parts=sync.num_parts[1] if sync is not None else 0,
        )

    def _training_now(self) -> TrainProgress | None:
        """Progress of the open round's training; None before its first step."""
        latest = self.watch.latest
        if latest is None or self.driver is None or latest.global_step < self.driver.machine.head.global_step:
            return None
        return latest

    def _what_training_waits_for(self) -> str:
        if self.holds.held:
            return f"the end of the hold ({', '.join(self.holds.reasons)}): nothing is trained meanwhile"
        if self.worker is not None and self.worker.pid is None:
            return "the trainer process to start again"
        if self.driver is not None and self.driver.loaded is not self.driver.machine.head:
            return "the trainer to load the state of the run"
        return "the first training steps"

    def _shards(self) -> tuple[ShardView, ...]:
        return self._leases.shards(self.driver.machine.head) if self.driver is not None else ()

    def _learning(self) -> LearningView:
        latest = self._training_now()
        updates = self.sync.updates.latest(_UPDATES_SHOWN) if self.sync is not None else ()
        return LearningView(
            loss_curve=tuple(self.watch.curve),
            val_curve=tuple(self.sync.val_curve) if self.sync is not None else (),
            tokens_per_s=latest.tokens_per_s if latest is not None else 0.0,
            tokens_total=self.sync.updates.tokens_certified if self.sync is not None else 0,
            inner_step=latest.local_step if latest is not None else 0,
            inner_steps=latest.num_inner_steps if latest is not None else 0,
            global_step=latest.global_step if latest is not None else 0,
            updates=tuple(
                UpdateView(round=update.round, verdict=update.verdict, tokens=update.tokens) for update in updates
            ),
        )

    def _network(self, round_number: int) -> NetworkView:
        sent, received = self.transport.bytes_sent(), self.transport.bytes_received()
        if self._round_began[0] != round_number:
            self._round_began = (round_number, sent, received)
        sent_per_s, received_per_s = self.rates.measure(time.monotonic(), sent, received)
        peers: tuple[PeerView, ...] = ()
        if self.driver is not None:
            head = self.driver.machine.head
            peers = tuple(
                PeerView(
                    peer=_text(row.peer),
                    me=row.peer == self.peer,
                    voter=row.voter_since is not None,
                    connected=row.peer == self.peer or self.transport.is_connected(row.peer),
                    shards=self._leases.owned(head, row.peer),
                    accepted_updates=row.accepted,
                    last_item_round=row.last_item_round,
                    latency_ms=None if row.peer == self.peer else self.transport.latency_ms(row.peer),
                    transport="" if row.peer == self.peer else self.transport.route(row.peer),
                )
                for row in head.state.roster
            )
        return NetworkView(
            bytes_sent=sent,
            bytes_received=received,
            sent_per_s=sent_per_s,
            received_per_s=received_per_s,
            round_sent=sent - self._round_began[1],
            round_received=received - self._round_began[2],
            peers=peers,
            listen=self.addresses,
        )

    def _counters(self) -> Counters:
        if self.driver is None:
            return Counters()
        tally, done = self.driver.tally, self.driver.errands.tally
        return Counters(
            rounds_adopted=tally.rounds_adopted,
            parts_aggregated=done.parts_aggregated,
            cuts_made=self.driver.machine.num_cuts,
            updates_published=self.driver.rounds.num_published,
            updates_acknowledged=done.updates_acknowledged,
            pieces_refused=done.pieces_refused,
            rechecks=done.rechecks,
            messages_sent=tally.messages_sent,
            messages_received=tally.messages_received,
            messages_refused=tally.messages_refused,
        )


def _recovery(progress: Progress | None) -> RecoveryView | None:
    plan = progress.recovery if progress is not None else None
    return None if plan is None else RecoveryView(keeps=tuple(map(_text, plan.keeps)), time_left_ms=plan.time_left_ms)


def _phases(progress: Progress, training: TrainProgress | None) -> tuple[PhaseView, ...]:
    names: tuple[Phase, ...] = PHASES
    current = names.index(progress.phase) if progress.phase in names else -1
    steps = (training.local_step, training.num_inner_steps) if training is not None else (0, 0)
    shares: dict[Phase, tuple[float, str]] = {
        "train": (steps[0] / max(1, steps[1]), f"{steps[0]}/{steps[1]} steps" if steps[1] else ""),
        "publish": (
            progress.own_acks / max(1, progress.own_acks_needed),
            f"{progress.own_acks} of {progress.own_acks_needed} acks",
        ),
        "acknowledge": (
            progress.receipts / max(1, progress.live),
            f"{progress.receipts} of {progress.live} receipts",
        ),
        "aggregate": (progress.parts_done / max(1, progress.parts), f"{progress.parts_done}/{progress.parts} parts"),
        "vote": (
            progress.votes / max(1, progress.votes_needed),
            f"{min(progress.votes, progress.votes_needed)} of {progress.votes_needed} votes",
        ),
        "adopt": (0.0, ""),
    }
    found = []
    for place, name in enumerate(names):
        share, detail = shares[name]
        if current < 0 or place > current:
            found.append(PhaseView(name=name, progress=0.0))
        elif place < current:
            found.append(PhaseView(name=name, progress=1.0))
        else:
            found.append(PhaseView(name=name, progress=min(1.0, share), detail=detail))
    return tuple(found)
