"""`spes-p2p service`: the text of the units, and what the commands do where systemd does not answer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.client import folders
from spes_p2p.client.cli import run
from spes_p2p.client.units import Unit, command_line, exec_start, unit_text

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LINK = f"spes-p2p:{'1f' * 32},bootstrap=/ip4/203.0.113.7/tcp/31337/p2p/{PEER},invite={'A' * 43}"


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where units go; systemd's user manager cannot be reached from here."""
    for name in [name for name in os.environ if name.startswith("SPES_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config" / "systemd" / "user"


def a_unit(*command: str) -> Unit:
    return Unit(kind="join", command=command, folder=Path("/some/where else"), environment={"SPES_GPU": "none 100%"})


@pytest.mark.parametrize("word", ["plain", "", "with space", 'quo"te', "back\\slash", "50%", "$HOME", "a\nb", "é", "'"])
def test_a_command_line_keeps_every_word(word: str) -> None:
    text = unit_text(a_unit("/bin/x", word, "end"))
    assert exec_start(text) == ("/bin/x", word, "end")
    assert len(command_line(["/bin/x", word]).splitlines()) == 1


def test_a_unit_is_notified_watched_and_restarted_when_that_is_of_use() -> None:
    lines = set(unit_text(a_unit("/bin/x")).splitlines())
    assert {
        "Type=notify",
        "Restart=on-failure",
        "RestartPreventExitStatus=2 4 6",
        "SuccessExitStatus=130",
        "WatchdogSec=180",
        "KillMode=mixed",
        'Environment="SPES_GPU=none 100%%"',
        "NoNewPrivileges=yes",
        "WantedBy=default.target",
    } <= lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("what", ["join", "bootstrap"])
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, units: Path, what: str) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    assert run(["service", "install", what, *([LINK] if what == "join" else []), "--no-start"]) == 0
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", str(units / f"spes-p2p-{what}.service")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_install_keeps_the_link_out_of_the_unit(units: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["service", "install", "join", LINK, "--gpu", "none", "--data-dir", "node", "--no-start"]) == 0
    text = (units / "spes-p2p-join.service").read_text()
    assert "1f1f" not in text
    assert "invite" not in text
    assert exec_start(text) == (
        *(sys.executable, "-m", "spes_p2p.client", "join", "--headless", "--log-json"),
        *("--gpu", "none", "--data-dir", "node"),
    )
    assert (units / "spes-p2p-join.service").stat().st_mode & 0o777 == 0o600
    assert folders.saved_link(Path("node")) == LINK
    assert "systemctl --user enable" in capsys.readouterr().out


def test_install_without_a_link_takes_the_run_joined_last(units: Path) -> None:
    folders.remember(Path("node"), LINK)
    assert run(["service", "install", "join", "--no-start"]) == 0
    words = exec_start((units / "spes-p2p-join.service").read_text())
    assert words[-2:] == ("--data-dir", str(Path("node").absolute()))


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["install", "foo"], 2, "'foo'"),
        (["install"], 2, "join|bootstrap"),
        (["install", "join"], 2, "no run to join"),
        (["install", "join", "rubbish"], 2, "spes-p2p:"),
        (["install", "bootstrap", "--lsten", "x"], 2, "--lsten"),
        (["install", "bootstrap", "--bootstrap", "rubbish"], 2, "good: "),
        (["install", "bootstrap", "--listen", "rubbish"], 2, "good: "),
        (["install", "bootstrap", "--peer-rate", "much"], 2, "--peer-rate"),
        (["install", "bootstrap", "--mirror", "0"], 2, "--mirror"),
        (["install", "bootstrap", "--log-size", "1MB"], 2, "--log-file"),
        (["install", "bootstrap", "--metrics", "here"], 2, "--metrics"),
        (["install", "join", LINK, "--detach"], 2, "--detach"),
        (["install", "join", LINK, "--tied"], 2, "--tied"),
        (["install", "join", LINK, "--upload", "5"], 2, "--upload"),
        (["install", "join", LINK, "--gpu", "fast"], 2, "--gpu"),
        (["install", "join", LINK, "--listen", "rubbish"], 2, "good: "),
        (["install", "join", LINK, "--log-size", "1MB"], 2, "--log-file"),
        (["uninstall", "join"], 2, "nothing is installed"),
    ],
)
def test_wrong_input_is_refused_and_writes_nothing(
    units: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, word: str
) -> None:
    assert run(["service", *arguments]) == code
    captured = capsys.readouterr()
    assert word in captured.err
    assert len(captured.err.strip().splitlines()) <= 2
    assert not list(units.glob("*"))
    assert not folders.default_folder().exists()  # nor is the link remembered


def test_the_options_of_a_service_may_be_many(units: Path) -> None:
    node = ["--gpu", "none", "--upload", "1MB/s", "--hours", "22:00-07:00", "--idle-only", "--log-file", "node.log"]
    assert run(["service", "install", "join", LINK, *node, "--no-start"]) == 0
    entry = ["--listen", "/ip4/0.0.0.0/tcp/31337", "--mirror", "10GB", "--peer-rate", "4MB", "--metrics", "off"]
    assert run(["service", "install", "bootstrap", *entry, "--no-start"]) == 0
    for what, words in (("join", node), ("bootstrap", entry)):
        command = exec_start((units / f"spes-p2p-{what}.service").read_text())
        assert set(words) <= set(command)


def test_without_systemd_the_unit_is_there_and_the_way_by_hand_is_named(
    units: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["service", "install", "bootstrap"]) == 5
    assert "By hand: systemctl --user daemon-reload" in capsys.readouterr().err
    assert run(["service", "show"]) == 0
    assert re.search(r"spes-p2p-bootstrap.service: \w+\n", capsys.readouterr().out)
    assert run(["service", "uninstall", "bootstrap"]) == 0
    assert not list(units.glob("*"))
