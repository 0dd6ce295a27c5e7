"""Wrong input of each kind: one or two lines, the right exit code, no traceback, nothing half-created."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.crypto import Identity

LINK = "spes-p2p:" + "1f" * 32
PEER = Identity.from_seed(bytes(32)).text

Run = Callable[..., Any]


def refused(answer: Any, code: int, *words: str) -> None:
    assert answer.code == code
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert 1 <= len(lines) <= 2, answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err


@pytest.mark.parametrize(
    ("link", "word"),
    [
        ("abc", "must begin with 'spes-p2p:'"),
        ("spes-p2p:1234", "64"),
        (LINK + ",bootstrap=/ip/1.2.3.4", "ip"),
        (LINK + ",invite=AAAA", "not 32"),
        (LINK + ",colour=blue", "'colour'"),
    ],
)
def test_a_bad_link_is_refused(spes_p2p: Run, home: Path, link: str, word: str) -> None:
    refused(spes_p2p("join", link, "--gpu", "none"), 2, "invite link", word)
    assert not home.exists()


def test_a_link_that_leads_to_nobody_is_refused_at_once(spes_p2p: Run, home: Path) -> None:
    refused(spes_p2p("join", LINK, "--gpu", "none"), 2, "no bootstrap address", "--bootstrap")
    assert not home.exists()


@pytest.mark.parametrize(
    ("flag", "address", "word"),
    [
        ("--bootstrap", "/ip/1.2.3.4/tcp/1", "ip"),
        ("--bootstrap", "/ip4/1.2.3.4/tcp/4001", "/p2p/"),
        ("--bootstrap", f"/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "99999"),
        ("--listen", "/ip4/1.2.3.4 /tcp/1", "space"),
        ("--listen", "4001", "4001"),
        ("--announce", "/ip4/1.2.3/tcp/1", "1.2.3"),
    ],
)
def test_a_bad_address_is_refused(spes_p2p: Run, home: Path, flag: str, address: str, word: str) -> None:
    refused(spes_p2p("join", LINK, flag, address), 2, word, "good: ")
    assert not home.exists()


def test_data_that_is_not_there_is_named(spes_p2p: Run, home: Path, tmp_path: Path) -> None:
    refused(spes_p2p("join", LINK, "--gpu", "none", "--data", tmp_path / "no.txt"), 2, "no.txt", "no such file")
    assert not home.exists()


def test_a_folder_without_text_is_refused(spes_p2p: Run, home: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(spes_p2p("join", LINK, "--gpu", "none", "--data", empty), 2, "no text in this folder")
    assert not home.exists()


def test_a_gpu_that_is_not_there_ends_with_5_and_names_none(spes_p2p: Run, home: Path) -> None:
    refused(spes_p2p("join", LINK, "--gpu", "99"), 5, "--gpu 99", "`--gpu none`")
    refused(spes_p2p("join", LINK, "--gpu", "0,99"), 5, "--gpu 0,99", "`--gpu none`")
    assert not home.exists()


@pytest.mark.parametrize("gpu", ["x", "0,0", "0,", "0,x", "-1", "cuda"])
def test_a_malformed_gpu_is_refused(spes_p2p: Run, home: Path, gpu: str) -> None:
    refused(spes_p2p("join", LINK, f"--gpu={gpu}"), 2, f"--gpu {gpu}")
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--threads", "0"], "--threads"), (["--capacity", "0"], "--capacity"), (["--frozen-format", "int2"], "--frozen")],
)
def test_a_bad_number_or_choice_names_its_flag(spes_p2p: Run, home: Path, arguments: list[str], word: str) -> None:
    refused(spes_p2p("join", LINK, *arguments), 2, word)
    assert not home.exists()


def test_an_unknown_command_or_option_points_to_help(spes_p2p: Run) -> None:
    refused(spes_p2p("jion"), 2, "jion", "spes-p2p --help")
    refused(spes_p2p("join", "--colour"), 2, "--colour", "spes-p2p join --help")


def test_join_without_any_link_asks_for_one(spes_p2p: Run, home: Path) -> None:
    refused(spes_p2p("join"), 2, "give the invite link")
    assert not home.exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("seed = ", "not TOML"),
        ("colour = 1", "colour"),
        ("[model]\nwidth = -1", "model.width"),
        ("experts_per_shard = 3", "multiple"),
        ("[training]\ninner_steps = [[5, 1]]", "inner_steps"),
        ("[model]\nvocab_size = 100", "at least 256"),
        ("[protocol]\nparts = 5000", "protocol.parts"),
        ("[model]\nnum_experts = 5000", "5000 shards"),
    ],
)
def test_a_bad_run_config_names_file_and_key(spes_p2p: Run, home: Path, tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    refused(spes_p2p("run", "create", path), 2, str(path), word)
    assert not home.exists()


def test_a_run_config_that_is_not_there_is_named(spes_p2p: Run, home: Path, tmp_path: Path) -> None:
    refused(spes_p2p("run", "create", tmp_path / "run.toml"), 2, "No such file")
    assert not home.exists()


def test_a_bad_founder_points_to_identity_show(spes_p2p: Run, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    refused(spes_p2p("run", "create", path, "--founder", "me"), 2, "--founder", "identity show")
    assert not home.exists()


def test_folder_of_another_run_is_not_taken_over(spes_p2p: Run, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "link").write_text("spes-p2p:" + "2e" * 32)
    (folder / "run.manifest").touch()
    refused(spes_p2p("join", LINK, "--data-dir", folder), 2, "belongs to another run", "--data-dir")
    config = tmp_path / "run.toml"
    config.write_text("")
    refused(spes_p2p("run", "create", config, "--data-dir", folder), 2, "belongs to a run already")
    assert sorted(path.name for path in folder.iterdir()) == ["link", "run.manifest"]


@pytest.mark.parametrize("command", ["status", "leave", "run recover"])
def test_a_node_that_does_not_run_ends_with_3(spes_p2p: Run, tmp_path: Path, command: str) -> None:
    refused(spes_p2p(*command.split()), 3, "no node runs in")
    refused(spes_p2p(*command.split(), "--data-dir", tmp_path / "nothing"), 2, "no such folder")
    refused(spes_p2p(*command.split(), "--run", "ab12"), 2, "has not joined such a run")


def test_a_damaged_identity_is_left_alone_and_ends_with_6(spes_p2p: Run, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.touch(mode=0o600)
    refused(spes_p2p("identity", "show", "--data-dir", tmp_path), 6, str(path), "empty")
    assert path.read_bytes() == b""


def test_demo_leaves_a_foreign_folder_alone(spes_p2p: Run, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    refused(spes_p2p("demo", "--headless", "--dir", tmp_path), 2, "is not empty")
    assert precious.read_text() == "mine"


def test_demo_refuses_figures_that_cannot_be_written(spes_p2p: Run, tmp_path: Path) -> None:
    refused(spes_p2p("demo", "--headless", "--json", tmp_path), 2, "is a folder")


def test_bad_environment_and_file_are_named(
    spes_p2p: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPES_THREADS", "many")
    refused(spes_p2p("join", LINK), 2, "SPES_THREADS")
    monkeypatch.delenv("SPES_THREADS")
    file = tmp_path / "config.toml"
    file.write_text("threads = 'many'")
    monkeypatch.setenv("SPES_CONFIG", str(file))
    refused(spes_p2p("join", LINK), 2, str(file), "threads")
    assert not home.exists()


def test_debug_shows_the_traceback_wherever_it_stands(spes_p2p: Run) -> None:
    for arguments in (["--debug", "join", "abc"], ["join", "abc", "--debug"]):
        answer = spes_p2p(*arguments)
        assert answer.code == 2
        assert "Traceback" in answer.err and "LinkError" in answer.err


def test_internal_error_is_one_that_can_be_reported(spes_p2p: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("spes_p2p.client.commands.status.read_snapshot", fail)
    refused(spes_p2p("status"), 1, "ZeroDivisionError: oh", "--debug")


def test_interrupt_ends_with_130(spes_p2p: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("spes_p2p.client.commands.status.read_snapshot", interrupt)
    answer = spes_p2p("status")
    assert answer.code == 130
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("command", [("join", LINK, "--gpu", "none"), ("limits",)])
@pytest.mark.parametrize(
    ("flag", "text", "word"),
    [
        ("--upload", "fast", "not a rate such as 1MB/s"),
        ("--upload", "8Mbit/s", "give bytes"),
        ("--download", "1kB/s", "50kB/s is the least"),
        ("--monthly", "7", "100GB"),
        ("--hours", "25:00-26:00", "22:00-07:00"),
        ("--gpu-share", "2", "between 5% and 100%"),
        ("--gpu-power", "-1W", "such as 200W"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    spes_p2p: Run, home: Path, command: tuple[str, ...], flag: str, text: str, word: str
) -> None:
    refused(spes_p2p(*command, flag, text), 2, flag, word)
    assert not home.exists()


def test_limits_of_no_node_and_damaged_ones_are_said_in_a_line(spes_p2p: Run, tmp_path: Path) -> None:
    refused(spes_p2p("limits", "--upload", "1MB/s", "--data-dir", str(tmp_path)), 3, "no node runs in")
    (tmp_path / "limits.json").write_text("{")
    link = f"{LINK},bootstrap=/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    answer = spes_p2p("join", link, "--gpu", "none", "--upload", "1MB/s", "--data-dir", str(tmp_path))
    refused(answer, 6, "limits.json is damaged", "Delete it")
