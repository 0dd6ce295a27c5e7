"""Commands in this process, apart from the user's own files and choices."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from spes_p2p.client import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in place of the user's, which does not exist yet."""
    for name in [name for name in os.environ if name.startswith("SPES_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def spes_p2p(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line and returns what it answered."""

    def run(*arguments: str | Path) -> Answer:
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
