"""Many seeds at once: on several cores, resumable, and what they say together."""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TextIO

from spes_p2p.errors import MachineError, UsageError
from spes_p2p.storage.atomic import disk_errors
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


QUEUED_PER_JOB = 2
"""Seeds that each worker has before it: one that it plays and one that follows at once."""


def play_seed(campaign: Campaign, seed: int) -> Outcome:
    """Play one seed."""
    scenario = draw(seed, num_peers=campaign.num_peers, num_rounds=campaign.num_rounds, chosen=campaign.faults)
    outcome, _ = play(scenario, told=lambda number: _tell(seed, number))
    return outcome


def trace_of(campaign: Campaign, told: Callable[[int], None] = lambda number: None) -> tuple[Outcome, list[str]]:
    """Play the first seed in this process and return its readable trace. `told`: as for `play`."""
    scenario = draw(
        campaign.first_seed, num_peers=campaign.num_peers, num_rounds=campaign.num_rounds, chosen=campaign.faults
    )
    return play(scenario, trace=True, told=told)


def play_all(
    campaign: Campaign,
    finished: Callable[[Outcome], None],
    looked: Callable[[Mapping[int, int]], None] = lambda rounds: None,
    look_every_s: float = 1.0,
) -> list[Outcome]:
    """Play all seeds that are not done yet, each in a worker process; all outcomes, by seed.

    A seed that ends with an error of any kind is a violation. `looked` is called at least every `look_every_s` seconds
    while seeds are played, with the newest certified round of each seed under way. Whatever ends this early, Ctrl-C for
    one, ends the workers too, and the file to resume from has the seeds that were finished. Raises UsageError if that
    file is of something else, MachineError if a worker was killed or the file cannot be written.
    """
    done = read_outcomes(campaign)
    seeds = range(campaign.first_seed, campaign.first_seed + campaign.num_seeds)
    outcomes = list(done.values())
    missing = iter([seed for seed in seeds if seed not in done])
    rounds: dict[int, int] = {}
    with _resume_file(campaign) as file, _workers(campaign.num_jobs) as (pool, told):
        running: dict[Future[Outcome], int] = {}
        ended: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
        while True:
            for seed in itertools.islice(missing, campaign.num_jobs * QUEUED_PER_JOB - len(running)):
                try:
                    future = pool.submit(play_seed, campaign, seed)
                except BrokenProcessPool as error:
                    raise _workers_lost(seed) from error
                running[future] = seed
                future.add_done_callback(ended.put)
            if not running:
                break
            futures = _all_ended(ended, look_every_s)
            while not told.empty():  # all that those have told: it left their workers before their outcome did
                rounds.update([told.get()])
            for future in futures:
                outcome = _outcome(campaign, running.pop(future), future)
                if file is not None:
                    file.write(json.dumps(_line(campaign, outcome)) + "\n")
                    file.flush()
                outcomes.append(outcome)
                finished(outcome)
                rounds.pop(outcome.seed, None)
            looked(rounds)
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _all_ended(ended: queue.SimpleQueue[Future[Outcome]], timeout_s: float) -> list[Future[Outcome]]:
    """Waits at most this long for one; all that have ended by then.

    `concurrent.futures.wait` will not do: it holds the lock of each future while it looks at them, and Ctrl-C at that
    moment leaves some locked for good, for which the pool's own thread then waits, and the process with it.
    """
    futures = []
    with suppress(queue.Empty):
        futures.append(ended.get(timeout=timeout_s))
        while True:
            futures.append(ended.get_nowait())
    return futures


@contextmanager
def _workers(num_jobs: int) -> Iterator[tuple[ProcessPoolExecutor, SimpleQueue[tuple[int, int]]]]:
    """A pool whose processes are gone when the context closes: at once, if an error or Ctrl-C closes it. And a queue
    with the (seed, round) that its workers tell."""
    context = multiprocessing.get_context("forkserver")
    others = set(multiprocessing.active_children())
    told: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
    pool = ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_begin_worker, initargs=(told,))
    try:
        yield pool, told
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _resume_file(campaign: Campaign) -> Iterator[TextIO | None]:
    """The file to resume from, for appending and for this process alone; what a kill left of a line is cut off.

    Raises UsageError if it cannot be opened or another process plays into it.
    """
    path = campaign.resume
    if path is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"--resume {path}: another process plays into it\nWait for its end, or stop it."
            ) from error
        except OSError as error:
            raise UsageError(f"--resume {path}: {error.strerror}") from error
        whole = path.read_bytes().rpartition(b"\n")
        file.truncate(len(whole[0]) + len(whole[1]))
        with disk_errors(path.parent):
            yield file


_tellers: list[SimpleQueue[tuple[int, int]]] = []
"""In a worker: where it tells how far it is."""


def _tell(seed: int, number: int) -> None:
    for teller in _tellers:
        teller.put((seed, number))


def _begin_worker(told: SimpleQueue[tuple[int, int]]) -> None:
    """In a worker: Ctrl-C is for the process that asked for the seeds; end when that has ended, however it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tellers.append(told)
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
    if isinstance(error, BrokenProcessPool):
        raise _workers_lost(seed) from error
    what = f"seed {seed}: {type(error).__name__}: {error}"
    num_peers = 0 if campaign.num_peers is None else campaign.num_peers
    return Outcome(seed=seed, num_peers=num_peers, faults=faults_text(campaign.faults), violations=(what,))


def _workers_lost(seed: int) -> MachineError:
    return MachineError(
        f"a worker process was killed while seed {seed} or its neighbours were played: is memory short?\n"
        "Try fewer --jobs; with --resume FILE what is finished is not played again."
    )


def _line(campaign: Campaign, outcome: Outcome) -> dict[str, Any]:
    return {**_key(campaign), **outcome.to_json()}


_BEGINNING = '{"of": ['
"""Of every line in the file to resume from."""


def _key(campaign: Campaign) -> dict[str, Any]:
    """What must be equal for a line to be of this campaign."""
    return {"of": [campaign.num_peers, campaign.num_rounds, faults_text(campaign.faults)]}


def read_outcomes(campaign: Campaign) -> dict[int, Outcome]:
    """Outcomes of the campaign's seeds in the file to resume from; what a kill cut off after the last newline does not
    count. Raises UsageError if the file belongs to another campaign, or to something else altogether."""
    path = campaign.resume
    if path is None or not path.exists():
        return {}
    found = {}
    try:
        *lines, cut_off = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--resume {path}: cannot be read: {error}") from error
    foreign = UsageError(f"--resume {path}: has something else than finished seeds; name another file")
    if not cut_off.startswith(_BEGINNING[: len(cut_off)]):
        raise foreign
    for line in lines:
        try:
            value = json.loads(line)
            of = value.pop("of")
            outcome = Outcome.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise foreign from error
        if of != _key(campaign)["of"]:
            peers, rounds, faults = of
            kind = f"{'drawn' if peers is None else peers} peers, {rounds} rounds, faults {faults}"
            raise UsageError(f"--resume {path}: has seeds of another kind ({kind})\nName another file, or play those.")
        if 0 <= outcome.seed - campaign.first_seed < campaign.num_seeds:
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
