"""`Scenario`: a swarm and its mishaps, drawn from a seed. The same seed gives the same scenario, always."""

from __future__ import annotations

import random
from dataclasses import dataclass

from spes_p2p.config import MergeConfig, ModelConfig, ProtocolConfig, RunConfig, TrainingConfig
from spes_p2p.protocol.params import faults, replicas
from spes_p2p.testing.sim.faults import ALL, BYZANTINE

MAX_FOUNDERS = 128
"""What a run manifest may list; more peers are members from the beginning."""
DEMO_PARTS = 4
USUAL_SIZES = (1, 2, 3, 3, 4, 4, 4, 5, 5, 6, 7, 7, 7, 8, 9, 10, 11, 12, 13)
"""What `num_peers` is drawn from: the sizes at which f grows are the interesting ones."""
LARGE_SWARM = 14
"""From this many peers on every peer has a shard of its own, as in a run that was set up for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens in one simulated run."""

    seed: int
    num_peers: int
    """Founders, and members from the beginning."""
    num_rounds: int
    """Rounds to certify at least; the last three are judged after healing."""
    faults: frozenset[str]
    """Those that happen, by name (`sim/faults.py`)."""
    byzantine: tuple[tuple[int, str], ...] = ()
    """(number of the founder, what it does)."""
    config: RunConfig
    capacity: int
    has_key: bool = False
    """Whether the first founder holds the recovery key."""


def draw(seed: int, *, num_peers: int | None, num_rounds: int, chosen: frozenset[str]) -> Scenario:
    """The scenario of a seed; `num_peers` None: drawn from 1 to 13.

    Of several chosen faults all happen in two seeds of five, and each with probability 1/2 in the others.
    """
    source = random.Random(f"scenario {seed}")
    drawn = source.choice(USUAL_SIZES)
    number = drawn if num_peers is None else num_peers
    active = chosen
    if len(chosen) > 1 and source.random() < 0.6:
        active = frozenset(name for name in ALL if source.random() < 0.5) & chosen
    config = _config(source, number, plain=not chosen)
    return Scenario(
        seed=seed,
        num_peers=number,
        num_rounds=num_rounds,
        faults=active,
        byzantine=_byzantine(source, number, config, active),
        config=config,
        capacity=source.choice((1, 2, 4)) if chosen else 2,
        has_key=bool(chosen) and source.random() < 0.5,
    )


def _byzantine(
    source: random.Random, number: int, config: RunConfig, chosen: frozenset[str]
) -> tuple[tuple[int, str], ...]:
    """Fewer than a third; fewer than `replicas` that spoil results, for whom less is the operator's trust."""
    voters = min(number, MAX_FOUNDERS)
    kinds = [kind for kind in BYZANTINE if kind in chosen]
    most = faults(voters)
    if not kinds or not most:
        return ()
    spoilers = replicas(config.protocol, voters, voters) - 1
    found = []
    for place in sorted(source.sample(range(voters), source.randint(0 if len(chosen) > len(kinds) else 1, most))):
        kind = source.choice(kinds)
        if kind in ("liars", "withhold"):
            if not spoilers:
                continue
            spoilers -= 1
        found.append((place, kind))
    return tuple(found)


def _config(source: random.Random, number: int, *, plain: bool) -> RunConfig:
    """The demo's times; with faults, also other kinds of runs."""
    num_experts = number if number >= LARGE_SWARM else 8
    kind = {} if plain else _other_kinds(source)
    merges = not plain and source.random() < 0.5
    training = TrainingConfig(
        inner_steps=((0, 10),),
        merge=MergeConfig(interval_steps=20, warmup_steps=1000) if merges else MergeConfig(),
    )
    if not plain and number < LARGE_SWARM:
        num_experts = source.choice((2, 8, 8, 16))
    times = {
        "round_max_ms": 40_000,
        "round_min_ms": 5_000,
        "train_grace_ms": 5_000,
        "min_rate_bytes_per_s": 5_000_000,
        "view_timeout_base_ms": 2_000,
        "view_timeout_step_ms": 1_000,
        "resend_ms": 1_000,
        "parts": DEMO_PARTS,
        "patience_ms": 10_000,
    }
    protocol = ProtocolConfig.model_validate({**times, **kind})
    model = ModelConfig(num_experts=max(2, num_experts), top_k=2)
    return RunConfig(protocol=protocol, training=training, model=model)


def _other_kinds(source: random.Random) -> dict[str, str]:
    return {
        "admission": source.choice(("invited", "invited", "open")),
        "robust": source.choice(("mean", "clipped")),
    }
