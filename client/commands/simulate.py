"""`spes-p2p simulate`: the round protocol over virtual time, with faults, and what must hold checked as it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spes_p2p.client.output import complain, prepare_file, prepare_json_file, say, write_json
from spes_p2p.client.seeds_progress import SeedsProgress
from spes_p2p.errors import EXIT_INTERRUPTED, UsageError
from spes_p2p.units import bytes_text

if TYPE_CHECKING:
    from spes_p2p.testing.sim.campaign import Campaign
    from spes_p2p.testing.sim.play import Outcome

EXIT_FAILED = 1
USUAL_ROUNDS = 6


def simulate(
    peers: Annotated[
        int | None, typer.Option("--peers", min=1, max=4096, help="Number of peers. Default: 1 to 13, by the seed.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=2, help="Rounds to certify. Default: 6; 5 from 100 peers on.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, one after the other.")] = 1,
    faults: Annotated[
        str, typer.Option("--faults", help="all, none, or names with commas; a wrong name lists them.", metavar="LIST")
    ] = "none",
    trace: Annotated[bool, typer.Option("--trace", help="Print what happens, message by message (one seed).")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file as one JSON object.", metavar="FILE")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Seeds played at a time. Default: one on each core.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Keep each finished seed here, and skip those that are here.", metavar="FILE"),
    ] = None,
) -> int:
    """Simulate swarms and check that they neither fork nor stop. Exit code 1 if one does.

    Example: spes-p2p simulate --faults all --seeds 100 --json figures.json
    """
    from spes_p2p.testing.sim.campaign import Campaign, summary
    from spes_p2p.testing.sim.faults import parse_faults

    if trace and seeds > 1:
        raise UsageError("--trace shows one seed; leave --seeds away")
    if trace and resume is not None:
        raise UsageError("--trace plays its seed in any case; leave --resume away")
    chosen = parse_faults(faults)
    prepare_json_file(json)
    prepare_file("--resume", resume)
    many_peers = peers is not None and peers >= 100
    campaign = Campaign(
        first_seed=seed,
        num_seeds=seeds,
        num_peers=peers,
        num_rounds=rounds or (5 if many_peers else USUAL_ROUNDS),
        faults=chosen,
        num_jobs=jobs or min(seeds, os.cpu_count() or 1),
        resume=resume,
    )
    progress = SeedsProgress(num_seeds=seeds)
    try:
        outcomes = _play(campaign, trace, progress)
    except KeyboardInterrupt:
        progress.close()
        complain(_interrupted_text(progress, resume))
        return EXIT_INTERRUPTED
    finally:
        progress.close()
    figures = summary(outcomes)
    if json is not None:
        write_json(json, figures)
    _say_table(figures)
    for failure in figures["failures"]:
        for text in (*failure["violations"], *failure["stuck"]):
            complain(f"seed {failure['seed']}: {text}")
        complain(f"again: {campaign.again(failure['seed'])}")
    return EXIT_FAILED if figures["failures"] else 0


def _play(campaign: Campaign, trace: bool, progress: SeedsProgress) -> list[Outcome]:
    from spes_p2p.testing.sim.campaign import play_all, read_outcomes, trace_of

    if trace:
        outcome, lines = trace_of(campaign, lambda number: progress.look({campaign.first_seed: number}))
        progress.close()
        for line in lines:
            say(line)
        return [outcome]
    progress.start(len(read_outcomes(campaign)))

    def finished(outcome: Outcome) -> None:
        progress.finished(outcome.seed, failed=bool(outcome.violations or outcome.stuck))

    return play_all(campaign, finished, progress.look)


def _interrupted_text(progress: SeedsProgress, resume: Path | None) -> str:
    text = f"interrupted: {progress.played:,} of {progress.num_seeds:,} seeds were played, {progress.failed} failed"
    if resume is None:
        return f"{text}\nWith --resume FILE the next command would go on from there."
    return f"{text}; they are in {resume}\nThe same command goes on from there."


def _say_table(figures: dict[str, Any]) -> None:
    say(f"seeds              {figures['seeds']} ({figures['waits']} wait on purpose in the end)")
    say(f"violations, stuck  {figures['violations']}, {figures['stuck']}")
    say(f"rounds final       {figures['rounds_final']}")
    say(f"in view 0          {100 * figures['view0_share']:.1f} % of the certificates, tentative ones included")
    if figures["round_s_p99"]:
        say(f"time per round     {figures['round_s_p50']:.1f} s (p50), {figures['round_s_p99']:.1f} s (p99)")
    messages, sent = figures["messages_per_peer_round"], bytes_text(figures["bytes_per_peer_round"])
    say(f"per peer and round {messages:.0f} messages, {sent} sent")
    say(f"most by a leader   {bytes_text(figures['leader_bytes_max'])} in its round")
