"""Many seeds at once: the figures, the file to resume from, what ends them early, and the command that plays them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from spes_p2p.client.cli import run
from spes_p2p.errors import EXIT_INTERRUPTED, MachineError, UsageError
from spes_p2p.testing.sim.campaign import Campaign, play_all, read_outcomes, summary
from spes_p2p.testing.sim.faults import ALL, BYZANTINE, parse_faults
from spes_p2p.testing.sim.play import Outcome

CONTRACT = [
    "violations",
    "stuck",
    "seeds",
    "rounds_final",
    "view0_share",
    "round_s_p50",
    "round_s_p99",
    "messages_per_peer_round",
    "bytes_per_peer_round",
]
COMMAND = [sys.executable, "-m", "spes_p2p.client", "simulate"]


def campaign(faults: str = "none", *, num_peers: int | None = 2, **more: object) -> Campaign:
    chosen = {"first_seed": 0, "num_seeds": 1, "num_rounds": 2, **more}
    return Campaign(**chosen, num_peers=num_peers, faults=parse_faults(faults))


def ignore(outcome: Outcome) -> None:
    """For seeds of which nobody is told."""


Started = tuple[subprocess.Popen[str], list[psutil.Process]]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Started]:
    """Starts the command; what it leaves behind when it is killed is in a folder of the test."""
    folder = str(tmp_path_factory.mktemp("t"))
    return lambda *arguments: started(*arguments, environment={**os.environ, "TMPDIR": folder})


def started(*arguments: str, environment: Mapping[str, str]) -> Started:
    """The command under way in a session of its own, and its worker processes."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    parent = psutil.Process(process.pid)
    for _ in range(1200):
        with suppress(psutil.NoSuchProcess):  # one that ended while it was looked at
            workers = [child for child in parent.children(recursive=True) if child.parent() != parent]
            if len(workers) >= 2:
                return process, workers
        psutil.wait_procs([parent], timeout=0.05)
    raise AssertionError("no workers")


def test_the_figures_are_what_is_promised(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert run(["simulate", "--peers", "4", "--rounds", "3", "--seeds", "2", "--jobs", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert list(figures)[: len(CONTRACT)] == CONTRACT
    assert [figures[key] for key in CONTRACT[:5]] == [0, 0, 2, 6, 1.0]
    assert 8 < figures["round_s_p50"] <= figures["round_s_p99"] < 10
    assert figures["leader_bytes_max"] > figures["bytes_per_peer_round"] > 0


def test_an_error_of_any_kind_is_a_violation() -> None:
    (outcome,) = play_all(campaign(num_peers=0), ignore)
    assert outcome.violations[0].startswith("seed 0: IndexError")
    assert summary([outcome])["violations"] == 1


# --- the file to resume from -----------------------------------------------------------------------------------------


def test_what_is_in_the_file_is_not_played_again_and_a_failure_in_it_counts(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"
    chosen = campaign(num_seeds=2, resume=file)
    first = play_all(chosen, ignore)
    played: list[Outcome] = []
    assert play_all(chosen, played.append) == first
    assert played == []
    line = json.loads(file.read_text().splitlines()[0])
    file.write_text(json.dumps(line | {"seed": 0, "violations": ["a fork"]}) + "\n")
    arguments = ["simulate", "--peers", "2", "--rounds", "2", "--resume", str(file)]
    assert run(arguments) == 1
    assert run([*arguments, "--faults", "loss"]) == 2


def test_only_the_seeds_that_are_asked_for_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"
    play_all(campaign(num_seeds=3, resume=file), ignore)
    assert sorted(read_outcomes(campaign(first_seed=1, num_seeds=5, resume=file))) == [1, 2]


def test_a_line_that_a_kill_cut_off_is_played_again(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"
    chosen = campaign(num_seeds=2, resume=file)
    first = play_all(chosen, ignore)
    whole = file.read_text()
    for length in (len(whole) - 1, len(whole) - 100, len(whole.splitlines()[0]) + 3):
        file.write_text(whole[:length])
        played: list[Outcome] = []
        assert play_all(chosen, played.append) == first
        assert len(played) == 1
        assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("content", ["notes of mine\n", "notes of mine", '{"of": []}\n', "\n", b"\xff\xfe\n"])
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "notes"
    data = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(data)
    with pytest.raises(UsageError, match=r"notes: (has something else|cannot be read)"):
        play_all(campaign(resume=file), ignore)
    assert file.read_bytes() == data


def test_two_processes_do_not_play_into_one_file(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"
    refused: list[str] = []

    def again(outcome: Outcome) -> None:
        with pytest.raises(UsageError) as error:
            play_all(campaign(first_seed=5, resume=file), ignore)
        refused.append(str(error.value))

    play_all(campaign(resume=file), again)
    assert "another process plays into it" in refused[0]


# --- early ends ------------------------------------------------------------------------------------------------------


def test_workers_end_with_the_process_that_asked_for_the_seeds(start: Callable[..., Started]) -> None:
    process, workers = start("--faults", "all", "--seeds", "500", "--jobs", "2")
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def test_ctrl_c_ends_at_once_and_what_was_played_stays(tmp_path: Path, start: Callable[..., Started]) -> None:
    file = tmp_path / "seeds.jsonl"
    process, workers = start("--seeds", "100000", "--jobs", "2", "--resume", str(file))
    for _ in range(1200):
        if file.exists() and file.read_text().count("\n") >= 2:
            break
        psutil.wait_procs(workers, timeout=0.05)
    # a terminal sends it to the workers as well
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    outcomes = read_outcomes(
        Campaign(
            first_seed=0, num_seeds=100_000, num_peers=None, num_rounds=6, faults=parse_faults("none"), resume=file
        )
    )
    assert len(outcomes) == file.read_text().count("\n") >= 2
    assert not any(outcome.violations for outcome in outcomes.values())
    assert f"interrupted: {len(outcomes)} of 100,000 seeds were played, 0 failed; they are in {file}" in told


def test_a_worker_that_is_killed_ends_it_and_makes_no_violations(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"

    def kill_one(rounds: Mapping[int, int]) -> None:
        multiprocessing.active_children()[0].kill()

    with pytest.raises(MachineError, match="a worker process was killed"):
        play_all(campaign("all", num_peers=13, num_seeds=50, num_rounds=6, resume=file), ignore, kill_one)
    assert not any(
        outcome.violations
        for outcome in read_outcomes(campaign("all", num_peers=13, num_seeds=50, num_rounds=6, resume=file)).values()
    )


def test_those_who_wait_are_told_in_which_round_a_seed_is() -> None:
    seen: set[tuple[int, int]] = set()
    play_all(campaign("all", num_peers=7, num_rounds=6), ignore, lambda rounds: seen.update(rounds.items()), 0.01)
    assert {number for _, number in seen} >= {1, 2, 3}
    assert {seed for seed, _ in seen} == {0}


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "rain,loss"], "--faults rain,loss: unknown: rain"),
        (["--faults", ","], "--faults ,: names nothing"),
        (["--faults", "none,loss"], "all and none stand alone"),
        (["--trace", "--seeds", "2"], "--trace shows one seed"),
        (["--trace", "--resume", "seeds.jsonl"], "--trace plays its seed in any case"),
        (["--json", f"{__file__}/x.json"], "is a file, not a folder"),
        (["--resume", f"{__file__}/x.jsonl"], "is a file, not a folder"),
        (["--resume", "."], "is a folder; name a file"),
        (["--seeds", "0"], "--seeds"),
        (["--seed", "-1"], "--seed"),
        (["--peers", "0"], "--peers"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_group_stands_for_its_faults() -> None:
    assert parse_faults("byzantine") == frozenset(BYZANTINE)
    assert parse_faults("churn,loss") == {"crash", "join", "leave", "loss"}
    assert parse_faults("lines,processes,byzantine,sybils,join,leave") == parse_faults("all") == frozenset(ALL)


@pytest.mark.parametrize(
    "drawn", [["--peers", "5", "--seed", "7", "--rounds", "4"], ["--seed", "3"]], ids=["five", "put out together"]
)
def test_the_same_seed_gives_the_same_trace_whatever_the_hash_seed(drawn: list[str]) -> None:
    traces = {
        subprocess.run(
            [*COMMAND, "--faults", "all", *drawn, "--trace"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    assert "adopts round 4" in traces.pop()


def test_all_faults_and_groups_are_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    names = [*ALL, "lines", "processes", "byzantine", "churn"]
    assert [name for name in names if f"`{name}`" not in page] == []
