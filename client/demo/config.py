"""The demo's run configuration for a number of peers and rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spes_p2p.config import RunConfig
from spes_p2p.errors import UsageError


def demo_config(num_peers: int, num_rounds: int) -> RunConfig:
    """`run.toml` with a schedule over these rounds, and with a shard for each peer.

    Raises UsageError if there are more peers than experts.
    """
    with resources.as_file(resources.files(__package__) / "run.toml") as path:
        config = RunConfig.from_toml(path)
    if num_peers > config.model.num_experts:
        raise UsageError(
            f"--peers {num_peers}: the demo's model has {config.model.num_experts} experts, one for a peer"
        )
    experts_per_shard = config.experts_per_shard
    while config.model.num_experts // experts_per_shard < num_peers:
        experts_per_shard //= 2
    # round 1 is for claims: nobody trains in it
    total_steps = max(num_rounds - 1, 1) * config.training.inner_steps_at(0)
    training = config.training.model_copy(update={"total_steps": total_steps})
    return RunConfig.model_validate(
        config.model_copy(update={"experts_per_shard": experts_per_shard, "training": training}).model_dump()
    )


def write_toml(config: RunConfig, path: Path) -> None:
    """Write a run configuration as an operator would."""
    path.write_text("\n".join(_lines("", config.model_dump(mode="json", exclude_none=True))) + "\n")


def _lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """TOML of one table: its plain values, then its own tables. JSON's numbers, strings and lists are TOML's too."""
    if name:
        yield f"\n[{name}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {json.dumps(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(f"{name}.{key}" if name else key, value)
