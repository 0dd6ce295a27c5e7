"""Asking for a passphrase: twice where a new one is chosen, or the first line of a file where nobody can be asked."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from spes_p2p.errors import UsageError

MIN_CHARACTERS = 8
_MAX_BYTES = 4096


def new_passphrase(file: Path | None) -> str:
    """A passphrase to seal with. Raises UsageError if it is too short, or there is nobody to ask."""
    text = _from_file(file) if file is not None else _asked("Passphrase for the backup", confirm=True)
    if len(text) < MIN_CHARACTERS:
        raise UsageError(f"a passphrase needs {MIN_CHARACTERS} characters at least: whoever has the file can try them")
    return text


def old_passphrase(file: Path | None) -> str:
    """The passphrase that something was sealed with. Raises UsageError if there is nobody to ask."""
    return _from_file(file) if file is not None else _asked("Passphrase of the backup", confirm=False)


def _from_file(file: Path) -> str:
    try:
        with file.open("rb") as source:
            text = source.read(_MAX_BYTES).decode()
    except OSError as error:
        raise UsageError(f"--passphrase-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--passphrase-file {file}: is not UTF-8 text") from error
    first = text.splitlines()[0] if text else ""
    if not first:
        raise UsageError(f"--passphrase-file {file}: its first line is empty")
    return first


def _asked(question: str, *, confirm: bool) -> str:
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to ask for the passphrase\nGive it in a file: --passphrase-file.")
    answer: str = typer.prompt(question, hide_input=True, confirmation_prompt=confirm)
    return answer
