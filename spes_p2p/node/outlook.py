"""What taking part in a run would mean for a machine, from what was measured and what the run's certificates say. Pure.

Certificates carry no time. How long rounds take is watched, or reckoned from the run's limits; what certificates tell
is how many members there are, and how many of their inner steps they manage before a round is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.config import RunConfig
from spes_p2p.node.traffic import Crowd
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.params import MAX_VOTERS, replicas
from spes_p2p.protocol.wire import ItemKind

RATE_SPREAD = 0.15
"""Standard deviation assumed of the mean speed over a whole round against a short measurement: other programs, heat."""
_DAY_S, _HOUR_S = 86_400, 3_600


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the members keep up, over the newest certificates."""

    num_rounds: int
    num_updates: int
    num_complete: int
    """Updates with all their inner steps."""

    @property
    def updates_per_round(self) -> float:
        """On the average; 0.0 without rounds."""
        return self.num_updates / self.num_rounds if self.num_rounds else 0.0


def pace_of(config: RunConfig, head: Head, bodies: Sequence[Body]) -> Pace:
    """Of certificates that follow each other, oldest first, the last one that of `head`. The first one counts only if
    it is that of round 1, since H of a round is in the certificate before it."""
    from_start = bool(bodies) and bodies[0].round == 1
    steps: list[int | None] = [config.training.inner_steps_at(0) if from_start else None]
    steps += [body.inner_steps for body in bodies[:-1]]
    num_rounds = num_updates = num_complete = 0
    for body, inner_steps in zip(bodies, steps, strict=False):
        if inner_steps is None:
            continue
        num_rounds += 1
        tokens = [entry.tokens for entry in body.entries if entry.kind is ItemKind.UPDATE]
        num_updates += len(tokens)
        num_complete += sum(one >= inner_steps * config.training.batch_tokens for one in tokens)
    return Pace(num_rounds=num_rounds, num_updates=num_updates, num_complete=num_complete)


def crowd_with_one_more(config: RunConfig, head: Head) -> Crowd:
    """The members of the next rounds with this machine among them, once it votes."""
    num_voters = min(len(head.state.voters) + 1, MAX_VOTERS)
    num_eligible = min(len(Terms(head).eligible) + 1, MAX_VOTERS)
    return Crowd(
        num_members=len(head.state.members) + 1,
        num_eligible=num_eligible,
        num_replicas=replicas(config.protocol, num_voters, num_eligible),
    )


def num_vacant(head: Head) -> int:
    """Shards that nobody owns."""
    return sum(not row.owners for row in head.state.leases)


def likely_shards(head: Head, num_possible: int) -> int:
    """How many shards a newcomer is likely to own: the vacant ones shared among the members, one at least, and no more
    than there is room for."""
    members = len(head.state.members) + 1
    share = math.ceil(len(head.state.leases) / members)
    return max(1, min(num_possible, share))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """How long a round takes."""

    seconds: float
    watched: int
    """Rounds that were watched; 0: reckoned."""
    how: str
    """Where it comes from, in words."""

    @property
    def rounds_per_hour(self) -> float:
        """So many."""
        return _HOUR_S / self.seconds

    @property
    def rounds_per_day(self) -> float:
        """So many."""
        return _DAY_S / self.seconds


def round_time(config: RunConfig, durations_s: Sequence[float], training_s: float | None, budget_s: float) -> RoundTime:
    """The mean of those watched; without any what the run's limits allow. `training_s`: what H steps take here, if that
    was measured; `budget_s`: T, for what comes after training."""
    if durations_s:
        mean_s = sum(durations_s) / len(durations_s)
        return RoundTime(seconds=mean_s, watched=len(durations_s), how=f"mean of {len(durations_s)} rounds watched")
    most_s = config.protocol.round_max_ms / 1000
    if training_s is None:
        how = "the longest that the run allows: no round was watched and no step measured"
        return RoundTime(seconds=most_s + budget_s, watched=0, how=how)
    how = "if the others are as fast as this machine, and transfers take half of their budget"
    return RoundTime(seconds=min(training_s, most_s) + budget_s / 2, watched=0, how=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Whether this machine makes all H steps before its training is ended."""

    training_s: float
    """What H steps take here."""
    limit_s: float
    chance: float
    """0.0 to 1.0."""
    why: str


def deadline(
    config: RunConfig, inner_steps: int, step_s: tuple[float, float], rounds: RoundTime, shortened_s: float = 0.0
) -> Deadline:
    """`step_s`: mean and standard deviation of a step, rests included. `shortened_s`: training has to end so much
    earlier, for a slow line.

    Training ends after `round_max_ms`, and `train_grace_ms` after half of the members are done, which is not later
    than the end of a round as they are now. The time of H steps is taken as normal, with the spread of single steps and
    RATE_SPREAD of the whole.
    """
    mean_s, deviation_s = step_s
    training_s = inner_steps * mean_s
    limit_s = most_s = config.protocol.round_max_ms / 1000
    why = "the run's round_max_ms"
    if rounds.watched:
        grace_s = config.protocol.train_grace_ms / 1000
        limit_s = min(most_s, rounds.seconds + grace_s)
        if limit_s < most_s:
            why = f"{rounds.seconds:.1f} s of a round as they are now, and {grace_s:.0f} s of grace"
    if shortened_s:
        limit_s = max(0.0, limit_s - shortened_s)
        why = f"{why}, less {shortened_s:.1f} s for the upload"
    spread_s = math.hypot(math.sqrt(inner_steps) * deviation_s, RATE_SPREAD * training_s)
    chance = 0.5 * (1 + math.erf((limit_s - training_s) / (spread_s * math.sqrt(2))))
    return Deadline(training_s=training_s, limit_s=limit_s, chance=chance, why=why)
