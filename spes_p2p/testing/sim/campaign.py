"""Many seeds at once: on several cores, resumable, and what they say together."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.errors import UsageError
from spes_p2p.testing.sim.faults import faults_text
from spes_p2p.testing.sim.play import Outcome, play
from spes_p2p.testing.sim.scenario import draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Which seeds to play, and how."""

    first_seed: int
    num_seeds: int
    num_peers: int | None
    """None: drawn from each seed, 1 to 13."""
    num_rounds: int
    faults: frozenset[str]
    num_jobs: int = 1
    resume: Path | None = None
    """One JSON line for each seed that is done; those that are there already are not played again."""

    def again(self, seed: int) -> str:
        """The command that plays one seed of it again and shows its trace."""
        peers = "" if self.num_peers is None else f" --peers {self.num_peers}"
        faults = faults_text(self.faults)
        return f"spes-p2p simulate{peers} --rounds {self.num_rounds} --faults {faults} --seed {seed} --trace"


def play_seed(campaign: Campaign, seed: int) -> Outcome:
    """Play one seed."""
    scenario = draw(seed, num_peers=campaign.num_peers, num_rounds=campaign.num_rounds, chosen=campaign.faults)
    outcome, _ = play(scenario)
    return outcome


def trace_of(campaign: Campaign) -> tuple[Outcome, list[str]]:
    """Play the first seed and return its readable trace."""
    scenario = draw(
        campaign.first_seed, num_peers=campaign.num_peers, num_rounds=campaign.num_rounds, chosen=campaign.faults
    )
    return play(scenario, trace=True)


def play_all(campaign: Campaign, finished: Callable[[Outcome], None]) -> list[Outcome]:
    """Play all seeds that are not done yet, each in a worker process; all outcomes, by seed.

    A seed that ends with an error of any kind is a violation.
    """
    done = read_outcomes(campaign)
    seeds = range(campaign.first_seed, campaign.first_seed + campaign.num_seeds)
    outcomes = [done[seed] for seed in seeds if seed in done]
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(campaign.num_jobs, mp_context=context, initializer=_end_with_parent) as pool:
        running = {pool.submit(play_seed, campaign, seed): seed for seed in seeds if seed not in done}
        for future in as_completed(running):
            outcome = _outcome(campaign, running[future], future)
            if campaign.resume is not None:
                with campaign.resume.open("a") as file:
                    file.write(json.dumps(_line(campaign, outcome)) + "\n")
            outcomes.append(outcome)
            finished(outcome)
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _end_with_parent() -> None:
    """In a worker: end when the process that asked for the seeds has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()


def _outcome(campaign: Campaign, seed: int, future: Future[Outcome]) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    what = f"seed {seed}: {type(error).__name__}: {error}"
    num_peers = 0 if campaign.num_peers is None else campaign.num_peers
    return Outcome(seed=seed, num_peers=num_peers, faults=faults_text(campaign.faults), violations=(what,))


def _line(campaign: Campaign, outcome: Outcome) -> dict[str, Any]:
    return {**_key(campaign), **outcome.to_json()}


def _key(campaign: Campaign) -> dict[str, Any]:
    """What must be equal for a line to be of this campaign."""
    return {"of": [campaign.num_peers, campaign.num_rounds, faults_text(campaign.faults)]}


def read_outcomes(campaign: Campaign) -> dict[int, Outcome]:
    """Outcomes in the file to resume from, by seed. Raises UsageError if it belongs to another campaign."""
    if campaign.resume is None or not campaign.resume.exists():
        return {}
    found = {}
    for line in campaign.resume.read_text().splitlines():
        try:
            value = json.loads(line)
            of = value.pop("of")
            outcome = Outcome.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the last line of a run that was killed
        if of != _key(campaign)["of"]:
            raise UsageError(f"--resume {campaign.resume}: has seeds with other peers, rounds or faults")
        found[outcome.seed] = outcome
    return found


def percentile(values: Sequence[int], share: float) -> float:
    """The value below which a share of them lies (nearest rank); 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The figures of `--json`; the first nine keys are a contract."""
    chosen = list(outcomes)
    round_ms = [duration for outcome in chosen for duration in outcome.round_ms]
    views = [view for outcome in chosen for view in outcome.views]
    peer_rounds = sum(outcome.peer_rounds for outcome in chosen)
    return {
        "violations": sum(len(outcome.violations) for outcome in chosen),
        "stuck": sum(bool(outcome.stuck) for outcome in chosen),
        "seeds": len(chosen),
        "rounds_final": sum(outcome.rounds_final for outcome in chosen),
        "view0_share": sum(view == 0 for view in views) / len(views) if views else 0.0,
        "round_s_p50": percentile(round_ms, 0.5) / 1000,
        "round_s_p99": percentile(round_ms, 0.99) / 1000,
        "messages_per_peer_round": sum(outcome.messages for outcome in chosen) / max(1, peer_rounds),
        "bytes_per_peer_round": sum(outcome.bytes_sent for outcome in chosen) / max(1, peer_rounds),
        "leader_bytes_max": max((outcome.leader_bytes for outcome in chosen), default=0),
        "waits": sum(outcome.waits for outcome in chosen),
        "failures": [
            {"seed": outcome.seed, "violations": list(outcome.violations), "stuck": list(outcome.stuck)}
            for outcome in chosen
            if outcome.violations or outcome.stuck
        ],
    }
