"""How far a simulation of many seeds is, in a terminal and elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from spes_p2p.client.output import prepare_file
from spes_p2p.client.seeds_progress import SeedsProgress
from spes_p2p.errors import UsageError


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Now:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_there_is_a_line_after_ten_seconds_and_then_each_minute() -> None:
    now, stream = Now(), Stream(terminal=False)
    progress = SeedsProgress(num_seeds=200, stream=stream, now_s=now)
    progress.start(100)
    for second in range(131):
        now.now_s = 100.0 + second
        if second == 60:
            for seed in range(50):
                progress.finished(seed, failed=False)
        progress.look({7: 3})
    assert stream.getvalue().splitlines() == [
        "100 of 200 seeds played, 0 failed; seed 7 in round 4; 10 s so far",
        "150 of 200 seeds played, 0 failed; seed 7 in round 4; 1 min 10 s so far; about 1 min 10 s left",
        "150 of 200 seeds played, 0 failed; seed 7 in round 4; 2 min 10 s so far; about 2 min 10 s left",
    ]


def test_in_a_terminal_one_line_is_rewritten_and_erased_before_anything_else() -> None:
    stream = Stream(terminal=True)
    progress = SeedsProgress(num_seeds=3, stream=stream, now_s=Now())
    progress.look({})
    progress.finished(0, failed=True)
    progress.look({})
    progress.close()
    progress.close()
    assert stream.getvalue().split("\r\x1b[K") == [
        "",
        "0 of 3 seeds played, 0 failed; 0 s so far",
        "seed 0 failed\n",
        "1 of 3 seeds played, 1 failed; 0 s so far; about 0 s left",
        "",
    ]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--json .*: File name too long"):
        prepare_file("--json", tmp_path / ("x" * 300))


def test_preparing_a_file_makes_its_folder_and_leaves_everything_else_as_it_is(tmp_path: Path) -> None:
    new, old = tmp_path / "folder" / "new.json", tmp_path / "old.json"
    old.write_text("old")
    prepare_file("--json", new)
    prepare_file("--json", old)
    prepare_file("--json", None)
    assert (new.exists(), new.parent.is_dir(), old.read_text()) == (False, True, "old")
