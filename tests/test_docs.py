"""What a user can type is documented, and what the documents point to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from spes_p2p.bootstrap import cli as bootstrap_cli
from spes_p2p.client import cli
from spes_p2p.client.settings import PREFIX, Choices
from spes_p2p.config import RunConfig
from spes_p2p.testing.command_tree import Leaf, leaves

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


COMMANDS = {leaf.name: leaf for leaf in leaves(cli.app, "spes-p2p")}
BOOTSTRAP = {leaf.name: leaf for leaf in leaves(bootstrap_cli.app, bootstrap_cli.PROGRAM)}
GLOBAL_OPTIONS = {"--help", "--debug", "--version"}


def mentioned() -> Iterator[tuple[str, str]]:
    """(page, words after `spes-p2p `) of every command line in the guides, to the end of its code or line."""
    for page in GUIDES:
        for found in re.finditer(r"(?<![\w./-])spes-p2p (?!=)([^`\n]*)", page.read_text()):
            yield page.name, found.group(1)


def command_of(words: str) -> Leaf | None:
    """The command that a command line of the guides names; None: it names none."""
    parts = words.split()
    for length in (2, 1):
        name = " ".join(["spes-p2p", *parts[:length]])
        if len(parts) >= length and name in COMMANDS:
            return COMMANDS[name]
    return None


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_and_option_is_documented(command: str) -> None:
    text = "\n".join(page.read_text() for page in GUIDES)
    assert command in text
    missing = [flag for flag in sorted(COMMANDS[command].options) if not re.search(rf"{re.escape(flag)}\b", text)]
    assert missing == []


def accepted(leaf: Leaf) -> frozenset[str]:
    """Its options, and where it passes others on, those of all commands."""
    return frozenset().union(*(one.options for one in COMMANDS.values())) if leaf.passes_on else leaf.options


def test_every_command_that_the_guides_name_is_there() -> None:
    groups = {name.split()[1] for name in COMMANDS if len(name.split()) > 2}
    wrong = [
        f"{page}: spes-p2p {words}"
        for page, words in mentioned()
        if re.match(r"[a-z]", words) and command_of(words) is None and words.split()[0] not in groups
    ]
    wrong += [
        f"{page}: spes-p2p {words}"
        for page, words in mentioned()
        if len(words.split()) > 1 and words.split()[0] in groups
        and re.fullmatch(r"[a-z-]+", words.split()[1]) and command_of(words) is None
    ]  # fmt: skip
    assert wrong == []


def test_every_option_that_the_guides_give_a_command_is_one_of_it() -> None:
    wrong = []
    for page, words in mentioned():
        leaf = command_of(words)
        if leaf is None:
            continue
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", words.partition("#")[0]):
            if option not in accepted(leaf) | GLOBAL_OPTIONS:
                wrong.append(f"{page}: {leaf.name} {option}")
    assert wrong == []


def test_every_option_in_a_table_of_the_guides_is_there() -> None:
    known = set().union(*(leaf.options for leaf in (*COMMANDS.values(), *BOOTSTRAP.values()))) | GLOBAL_OPTIONS
    for page in GUIDES:
        rows = re.findall(r"^\| `(--[a-z-]+)", page.read_text(), flags=re.MULTILINE)
        assert set(rows) - known == set(), page.name


@pytest.mark.parametrize("leaf", [*COMMANDS.values(), *BOOTSTRAP.values()], ids=lambda leaf: leaf.name)
def test_every_help_has_an_example_that_its_own_options_accept(leaf: Leaf) -> None:
    examples = leaf.examples
    assert examples, f"the help of {leaf.name} needs a line such as `Example: {leaf.name} --json`"
    for words in examples:
        assert tuple(words[: len(leaf.path)]) == leaf.path
        given = [word.partition("=")[0] for word in words[len(leaf.path) :] if word.startswith("--")]
        assert set(given) - accepted(leaf) == set()


def test_the_help_of_every_group_names_its_commands() -> None:
    for name in {leaf.path[1] for leaf in COMMANDS.values() if len(leaf.path) > 2}:
        shown = CliRunner().invoke(cli.app, [name, "--help"]).output
        assert {leaf.path[2] for leaf in COMMANDS.values() if leaf.path[1] == name} <= set(shown.split())


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


def test_make_test_gpu_reaches_every_test_that_is_marked_for_one() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest -m gpu" in line]
    places = [word for word in line.split() if word.startswith("tests")]
    marked = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    }
    marked.discard(str(Path(__file__).relative_to(ROOT)))
    assert marked
    assert {path for path in marked if not any(path.startswith(place + "/") for place in places)} == set()
