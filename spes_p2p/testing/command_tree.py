"""The tree of commands of a typer program, for tests that hold for every command, those that come later too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

HELP_FLAGS = frozenset({"-h", "--help"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One command that does something."""

    path: tuple[str, ...]
    """As typed, the program's name first."""
    command: Any
    """typer's object; its module gives no public name to its class."""

    @property
    def name(self) -> str:
        """As typed."""
        return " ".join(self.path)

    @property
    def help(self) -> str:
        """All that its help says besides the table of options."""
        return "\n".join(filter(None, (self.command.help, self.command.epilog)))

    @property
    def parameters(self) -> list[Any]:
        """What can be given to it, hidden options left out."""
        return [one for one in self.command.params if not getattr(one, "hidden", False) and one.name != "help"]

    @property
    def options(self) -> frozenset[str]:
        """Its visible long options, both sides of a switch, without --help."""
        texts = {text for one in self.parameters for text in (*one.opts, *one.secondary_opts)}
        return frozenset(text for text in texts if text.startswith("--")) - HELP_FLAGS

    @property
    def passes_on(self) -> bool:
        """Whether it takes the options of other commands too, such as a service those of what it runs."""
        return bool(self.command.context_settings.get("ignore_unknown_options"))

    @property
    def examples(self) -> list[list[str]]:
        """The words of every example of its help, the program's name first."""
        text = re.sub(r"\s*\n\s*", " ", self.help.replace("\n\n", "\0")).replace("\0", "\n")
        return [shlex.split(found) for found in re.findall(r"Examples?: +(\S.*)", text)]


def leaves(app: typer.Typer, program: str) -> Iterator[Leaf]:
    """Every command of a program that has no commands of its own, by name."""
    todo: list[tuple[tuple[str, ...], Any]] = [((program,), typer.main.get_command(app))]
    while todo:
        path, command = todo.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield Leaf(path, command)
        else:
            todo += [((*path, name), inner[name]) for name in sorted(inner)]
