"""Log files of bounded size, as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from spes_p2p.client.cli import run
from spes_p2p.client.logs import FILE_LOGGER, set_up
from spes_p2p.errors import UsageError
from spes_p2p.storage.logfile import JsonLines, LogFile, RotatingLines


def close(logger: logging.Logger) -> None:
    for handler in tuple(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def test_a_full_file_makes_room_for_a_new_one_and_so_many_older_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "node.log"
    log = set_up(as_json=True, file=LogFile(path=path, size_bytes=1_000, kept=2))
    for number in range(50):
        log.info("round certified", round=number)
    close(logging.getLogger(FILE_LOGGER))
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2"]
    assert all(file.stat().st_size <= 1_000 for file in files)
    lines = [json.loads(line) for file in reversed(files) for line in file.read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(50 - len(lines), 50))
    assert {"event", "level", "timestamp", "round"} == set(lines[0])


def test_a_record_is_one_json_object_with_its_traceback() -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "file", 1, "it %s", ("failed",), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["event"], line["level"], line["timestamp"][-1]) == ("it failed", "error", "Z")
    assert "ValueError: bad" in line["traceback"]


def test_a_disk_that_refuses_is_complained_about_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("test of a full disk")
    logger.propagate = False
    handler = RotatingLines(LogFile(path=tmp_path / "node.log"))
    logger.addHandler(handler)
    handler.stream.close()
    logger.error("one")
    logger.error("two")
    handler.stream = (tmp_path / "another").open("w")  # for the end of the handler
    close(logger)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--log-file"):
        RotatingLines(LogFile(path=tmp_path))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--log-size", "10MB"], "--log-file"),
        (["--log-file", "x", "--log-size", "much"], "good: "),
        (["--log-file", "x", "--log-size", "5"], "--log-size"),
        (["--log-file", "x", "--log-keep", "0"], "--log-keep"),
    ],
)
@pytest.mark.parametrize("command", ["join", "bootstrap"])
def test_wrong_flags_are_refused_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    word: str,
) -> None:
    monkeypatch.setenv("SPES_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run([command, *arguments]) == 2
    captured = capsys.readouterr()
    assert word in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
