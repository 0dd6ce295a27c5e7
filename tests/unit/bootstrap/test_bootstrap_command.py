"""`spes-p2p-bootstrap` without the rest of the product: one or two lines and an exit code for wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.bootstrap import cli
from spes_p2p.storage.lock import FolderLock


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--lsten", "x"], 2, "--lsten"),
        (["extra"], 2, "extra"),
        (["--listen", "/ip/0.0.0.0/tcp/1"], 2, "'ip4'"),
        (["--bootstrap", "/ip4/203.0.113.7/tcp/1"], 2, "/p2p/"),
    ],
)
def test_wrong_input_is_refused_in_a_line_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, word: str
) -> None:
    folder = tmp_path / "bootstrap"
    assert cli.run(["--data-dir", str(folder), *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert word in captured.err
    assert not folder.exists()


@pytest.mark.parametrize("flags", [(), ("--log-json",)])
def test_why_it_ended_is_in_the_log_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    folder, log = tmp_path / "bootstrap", tmp_path / "node.log"
    with FolderLock(folder):
        assert cli.run(["--data-dir", str(folder), "--log-file", str(log), *flags]) == 6
    (line,) = log.read_text().splitlines()
    event = json.loads(line) if flags else {"event": line, "level": "error"}
    assert event["level"] == "error"
    assert event["event"].endswith(" ".join(capsys.readouterr().err.split()))
    assert "identity in use" in line


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert "--listen" in capsys.readouterr().out
