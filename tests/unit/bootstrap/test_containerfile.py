"""The Containerfile says nothing that is not so: what it copies is there, and what it starts can be started."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import typer

from spes_p2p.client import cli

ROOT = Path(__file__).parents[3]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line]


def test_it_is_made_of_known_instructions_and_begins_with_its_base() -> None:
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    known = "FROM WORKDIR COPY RUN ENV USER VOLUME EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert set(names) <= set(known.split())


def test_what_is_copied_is_there_and_not_left_out() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    for name, arguments in instructions():
        if name == "COPY" and not arguments.startswith("--from"):
            *sources, _ = arguments.split()
            assert all((ROOT / source).exists() and source not in ignored for source in sources)


def test_it_does_not_run_as_root_and_keeps_its_state_in_the_volume() -> None:
    found = dict(instructions())
    assert found["USER"] == "spes"
    assert found["VOLUME"] == "/data"
    assert "SPES_HOME=/data" in found["ENV"]


def test_what_it_starts_is_a_command_and_its_health_check_is_there() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["spes-p2p"]
    name, *arguments = json.loads(found["CMD"])
    group = typer.main.get_command(cli.app)
    command = getattr(group, "commands", {})[name]
    assert command.make_context(name, arguments).params["listen"]
    check = json.loads(found["HEALTHCHECK"].split("CMD ", 1)[1])
    assert check[:2] == ["python", "-m"]
    assert importlib.util.find_spec(check[2]) is not None


@pytest.mark.parametrize("flag", ["--interval", "--timeout", "--start-period", "--retries"])
def test_the_health_check_is_given_time(flag: str) -> None:
    assert flag in dict(instructions())["HEALTHCHECK"]
