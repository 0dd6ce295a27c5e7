"""A live swarm under SIGKILLs at random moments: the scenario, its verdicts, and its figures.

    python -m spes_p2p.testing.kills --peers 6 --kills 20 --rounds 20 --seed 1 --json FILE

Who is killed, and at which point of which phase, follows from the seed; what the swarm does by then does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

from spes_p2p.config import RunConfig
from spes_p2p.errors import SpesError
from spes_p2p.testing.live import Finals, LiveSwarm, live_swarm, quick_config

PEERS = ("ada", "ben", "cleo", "dan", "eve", "fay", "gus", "hal")
PHASES = ("load", "train", "publish", "acknowledge", "aggregate", "vote")
_POLL_S = 0.05
_PHASE_S = 15.0
"""How long a victim is watched for its phase; then it is killed wherever it is."""
_LATEST_S = 8.0
"""Kills that wait for no phase come this late at most."""
_OVERLAP = 0.2
"""Share of the kills that come while an earlier victim is still starting."""
_START_S = 300.0
_ROUND_S = 240.0
"""Bound for the next round, whatever was killed: a restart on a busy machine takes most of a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of it."""

    peers: int = 6
    kills: int = 20
    rounds: int = 20
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL: of whom, and when."""

    victim: str
    phase: str
    """The victim's phase that is waited for; empty: none."""
    delay_s: float
    """After that phase, or after the last event."""
    overlaps: bool
    """Do not wait for earlier victims to be back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came out."""

    peers: int
    kills: int
    seed: int
    rounds_final: int
    seconds: float
    lost: int
    """Final certificates that a peer had before a kill and not after it, or with another hash."""
    contradicting: int
    """Rounds of which two peers have different final certificates."""
    accused: int
    """Times that somebody found a peer to have signed two statements for one slot."""
    rejoin_s: tuple[float, ...]
    """From a start to the adoption, as a member, of a round that was open at that start or later."""
    rejoin_s_p50: float
    rejoin_s_p95: float
    round_s_p50: float
    """Between the certificates as the test saw them, restarts included."""
    held_out: tuple[float, ...]
    """Mean held-out loss, nats per byte, of each fifth of the rounds."""


def plan_kills(scale: Scale, names: Sequence[str]) -> Iterator[Kill]:
    """The kills of a seed. Half of them wait for a phase of their victim, the others for a random time only."""
    random = Random(scale.seed)
    for _ in range(scale.kills):
        at_phase = random.random() < 0.5
        yield Kill(
            victim=random.choice(names),
            phase=random.choice(PHASES) if at_phase else "",
            delay_s=random.uniform(0, 0.5 if at_phase else _LATEST_S),
            overlaps=random.random() < _OVERLAP,
        )


def run_kills(folder: Path, scale: Scale, config: RunConfig | None = None) -> Figures:
    """Run the scenario. Raises SpesError at an orphan, a node that ends by itself, or a round that does not come."""
    names = PEERS[: scale.peers]
    with live_swarm(folder, config or quick_config()) as swarm:
        swarm.found(names)
        scenario = _Scenario(swarm, names)
        scenario.wait_round(2, _START_S)
        for kill in plan_kills(scale, names):
            scenario.strike(kill)
        scenario.wait_back(())
        scenario.wait_round(max(scale.rounds, scenario.highest + 1), _ROUND_S * scale.rounds)
        return scenario.figures(scale)


@dataclass(slots=True)
class _Scenario:
    """The swarm, and what was seen of it."""

    swarm: LiveSwarm
    names: Sequence[str]
    began_s: float = field(default_factory=time.monotonic)
    highest: int = 0
    """Newest round that anybody was seen to have certified."""
    seen_s: dict[int, float] = field(default_factory=dict)
    """Round -> when it was first seen certified."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Round -> held-out loss, of whoever told it first."""
    returning: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Peer -> (when it was started, the round that was open then)."""
    rejoins_s: list[float] = field(default_factory=list)
    before: dict[str, Finals] = field(default_factory=dict)
    """Peer -> what it had on disk when last looked."""
    lost: int = 0

    def look(self) -> None:
        """Take in what everybody says. Raises SpesError if one has ended by itself."""
        for name in self.names:
            self.swarm.children[name].check()
            snapshot = self.swarm.look(name)
            if snapshot is None:
                continue
            if snapshot.certified_round > self.highest:
                self.highest = snapshot.certified_round
                self.seen_s[self.highest] = time.monotonic()
            for number, loss in snapshot.learning.val_curve:
                self.held_out.setdefault(number, loss)
            if name in self.returning:
                started_s, open_round = self.returning[name]
                if snapshot.member and snapshot.certified_round >= open_round:
                    self.rejoins_s.append(time.monotonic() - started_s)
                    del self.returning[name]

    def wait_round(self, number: int, limit_s: float) -> None:
        """Until somebody has certified that round."""

        def reached() -> bool:
            self.look()
            return self.highest >= number

        self.swarm.wait(reached, limit_s, f"round {number}")

    def wait_back(self, but: Sequence[str]) -> None:
        """Until all that were started again, but those, take part in the newest round."""

        def back() -> bool:
            self.look()
            return not self.returning.keys() - set(but)

        self.swarm.wait(back, _ROUND_S, f"return of {', '.join(self.returning)}")

    def strike(self, kill: Kill) -> None:
        """One kill with its restart; what was on the victim's disk before must be there after."""
        if not kill.overlaps:
            self.wait_back(())
            self.wait_round(self.highest + 1, _ROUND_S)
        if kill.phase:
            self.swarm.wait_phase(kill.victim, [kill.phase], _PHASE_S)
        until_s = time.monotonic() + kill.delay_s
        self.swarm.wait(lambda: time.monotonic() >= until_s, kill.delay_s + _PHASE_S, "moment", _POLL_S)
        self._note_finals(kill.victim)
        self.swarm.kill(kill.victim)
        self._note_finals(kill.victim)
        self.swarm.restart(kill.victim)
        self.returning[kill.victim] = time.monotonic(), self.highest + 1

    def _note_finals(self, name: str) -> None:
        finals = self.swarm.finals(name)
        self.lost += len(lost_finals(self.before.get(name, {}), finals))
        self.before[name] = finals

    def figures(self, scale: Scale) -> Figures:
        """The end of it: everybody's disk is looked at once more, whole chains included."""
        for name in self.names:
            self._note_finals(name)
            self.swarm.history(name)  # raises if the certificates are no chain
        ends_s = [self.seen_s[number] for number in sorted(self.seen_s)]
        gaps_s = [after - before for before, after in pairwise(ends_s)]
        return Figures(
            peers=scale.peers,
            kills=scale.kills,
            seed=scale.seed,
            rounds_final=max(number for finals in self.before.values() for _, number in finals),
            seconds=round(time.monotonic() - self.began_s, 1),
            lost=self.lost,
            contradicting=len(contradictions(self.before)),
            accused=sum(self.swarm.said(name).count("signed two") for name in self.names),
            rejoin_s=tuple(round(seconds, 1) for seconds in self.rejoins_s),
            rejoin_s_p50=round(percentile(self.rejoins_s, 0.5), 1),
            rejoin_s_p95=round(percentile(self.rejoins_s, 0.95), 1),
            round_s_p50=round(percentile(gaps_s, 0.5), 1),
            held_out=tuple(round(loss, 4) for loss in means([self.held_out[n] for n in sorted(self.held_out)], 5)),
        )


def lost_finals(before: Finals, after: Finals) -> set[tuple[int, int]]:
    """Final certificates that are gone, or another one now."""
    return {place for place, found in before.items() if after.get(place) != found}


def contradictions(finals: dict[str, Finals]) -> set[tuple[int, int]]:
    """Places in the chain of which two peers hold different final certificates."""
    known: Finals = {}
    places = [entry for of_one in finals.values() for entry in of_one.items()]
    return {place for place, found in places if known.setdefault(place, found) != found}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0


def means(values: Sequence[float], num_groups: int) -> list[float]:
    """Mean of each of that many successive groups, as far as there are values."""
    bounds = [len(values) * group // num_groups for group in range(num_groups + 1)]
    groups = [values[first:last] for first, last in pairwise(bounds)]
    return [sum(group) / len(group) for group in groups if group]


def lines(figures: Figures) -> Iterator[str]:
    """The figures for people."""
    yield f"{figures.peers} processes, {figures.kills} SIGKILLs with restarts, seed {figures.seed}"
    yield f"final rounds        {figures.rounds_final} in {figures.seconds:.0f} s, median {figures.round_s_p50} s"
    yield f"lost certificates   {figures.lost}"
    yield f"contradicting       {figures.contradicting}"
    yield f"accused             {figures.accused}"
    slowest = max(figures.rejoin_s, default=0.0)
    yield f"rejoin              p50 {figures.rejoin_s_p50} s, p95 {figures.rejoin_s_p95} s, slowest {slowest} s"
    yield f"held-out loss       {' > '.join(map(str, figures.held_out))} nats per byte, by fifths of the rounds"


def main() -> int:
    """Entry point. Exit code 1 if a certificate was lost or contradicted, or an honest peer accused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dataclasses.asdict(Scale()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", type=Path, help="where everything is kept; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    scale = Scale(peers=chosen.peers, kills=chosen.kills, rounds=chosen.rounds, seed=chosen.seed)
    try:
        with tempfile.TemporaryDirectory(prefix="spes-kills-") as folder:
            figures = run_kills(chosen.dir or Path(folder), scale)
    except SpesError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(lines(figures)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(dataclasses.asdict(figures), indent=2) + "\n")
    return 1 if figures.lost or figures.contradicting or figures.accused else 0


if __name__ == "__main__":
    sys.exit(main())
