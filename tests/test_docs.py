"""What a user can type is documented, and what the documents point to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from spes_p2p.client import cli
from spes_p2p.client.settings import PREFIX, Choices
from spes_p2p.config import RunConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
GUIDES = [
    ROOT / "README.md",
    ROOT / "docs" / "volunteer.md",
    ROOT / "docs" / "operator.md",
    ROOT / "docs" / "simulator.md",
]
WORDS = """
run, round, inner step, outer step, expert, expert shard, psi, part, member, voter, leader, aggregator, owner, lease,
claim, orphan, update, blob, ack, receipt, cut, proposal, vote, certificate, final, tentative, tip, epoch, invite link,
founder, volunteer, operator, bootstrap node
"""


def commands() -> Iterator[tuple[str, list[str]]]:
    """(command as typed, its visible flags)."""
    group = typer.main.get_command(cli.app)
    todo = [("spes-p2p", group)]
    while todo:
        path, command = todo.pop()
        inner = getattr(command, "commands", None)
        if inner is None:
            flags = [
                option
                for parameter in command.params
                if not getattr(parameter, "hidden", False)
                for option in parameter.opts
                if option.startswith("--") and option != "--help"
            ]
            yield path, flags
        else:
            todo += [(f"{path} {name}", inner[name]) for name in sorted(inner)]


COMMANDS = dict(commands())


def test_the_commands_are_there() -> None:
    assert sorted(COMMANDS) == [
        f"spes-p2p {name}"
        for name in [
            "attach",
            "bootstrap",
            "demo",
            "identity show",
            "join",
            "leave",
            "ledger show",
            "ledger verify",
            "limits",
            "pause",
            "resume",
            "run admit",
            "run create",
            "run recover",
            "simulate",
            "status",
        ]
    ]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_and_flag_is_documented(command: str) -> None:
    text = "\n".join(page.read_text() for page in GUIDES)
    assert command in text
    for flag in COMMANDS[command]:
        assert re.search(rf"{re.escape(flag)}\b", text), f"{command} {flag}"


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "volunteer.md").read_text()
    names = {PREFIX + name.upper() for name in Choices.model_fields if name != "rounds"} | {"SPES_CONFIG", "SPES_HOME"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def config_keys(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from config_keys(kind)
        else:
            yield name


def test_every_key_of_a_run_configuration_is_documented() -> None:
    text = (ROOT / "docs" / "operator.md").read_text()
    assert {key for key in config_keys(RunConfig) if not re.search(rf"`([a-z]+\.)?{key}`", text)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_readme_sets_up_with_exactly_two_commands() -> None:
    section = (ROOT / "README.md").read_text().split("## Set-up and use")[1].split("\n## ")[0]
    assert re.findall(r"^ {4}(\S.*)$", section, flags=re.MULTILINE) == ["make demo", "make test"]


def test_glossary_defines_every_word_of_the_style_guide_in_order() -> None:
    entries = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    defined = {word for entry in entries for word in entry.split(", ")}
    assert {word.strip() for word in WORDS.replace("\n", " ").split(",")} - defined == set()
    assert entries == sorted(entries, key=str.lower)


def test_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    from spes_p2p import errors

    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)} - {1}
    rows = set(map(int, re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)))
    assert rows == codes | {0, 130}


def test_makefile_names_its_targets_in_the_head() -> None:
    head, body = (ROOT / "Makefile").read_text().split("PYTHON ?=", 1)
    for target in ("demo", "test", "lint", "bench", "nightly"):
        assert f"make {target}" in head
        assert re.search(rf"^{target}:", body, flags=re.MULTILINE)
