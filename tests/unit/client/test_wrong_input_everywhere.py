"""Whatever is given to whichever command: one or two lines, an exit code of ours, no traceback.

The commands are those of the program's tree, so that one that is added later is tried as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.client import cli
from spes_p2p.crypto import Identity
from spes_p2p.testing.command_tree import Leaf, leaves

Run = Callable[..., Any]
LEAVES = {leaf.name: leaf for leaf in leaves(cli.app, "spes-p2p")}
PEER = Identity.from_seed(bytes(32)).text
LINK = f"spes-p2p:{'1f' * 32},bootstrap=/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
OUR_CODES = {2, 3, 4, 5, 6}
LONG = "x" * 5000

GOOD: dict[str, str] = {"link": LINK, "config_file": "{run_toml}", "peer": PEER, "file": "{missing}/key.json"}
"""Arguments that a command cannot do without, by the name of the parameter."""

BAD: dict[str, list[str]] = {
    "link": ["abc", "spes-p2p:12", "", f"spes-p2p:{'1f' * 32},bootstrap=/ip/1.2.3.4", LONG, "💥"],
    "config_file": ["{missing}/run.toml", "{folder}", "{binary}", "", LONG],
    "peer": ["me!", "", LONG, "💥"],
    "file": ["{missing}/key.json", "{folder}", "{binary}", LONG],
    "--data-dir": ["{file}", "{file}/below", LONG],
    "--run": ["zz!", "spes-p2p:12", LONG, "💥"],
    "--gpu": ["x", "0,0", "-1", "💥", LONG],
    "--data": ["{missing}", "{binary}", "{empty}", "{missing}/*.txt", LONG],
    "--listen": ["4001", "/ip/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/99999", "", LONG],
    "--announce": ["example.org", "/ip4/1.2.3/tcp/1", "", LONG],
    "--bootstrap": ["example.org:31337", "/ip4/1.2.3.4/tcp/4001", "", LONG],
    "--founder": ["me", "", LONG],
    "--memory": ["much", "10", "-1GB", ""],
    "--upload": ["fast", "0", "-1MB", "1"],
    "--frozen-format": ["int2", "", "💥"],
    "--moments": ["int2", ""],
    "--faults": ["plague", "💥"],
    "--json": ["{folder}", "{file}/below.json", LONG],
    "--resume": ["{folder}", "{file}/below", LONG],
    "--dir": ["{file}", "{full}", LONG],
    "--passphrase-file": ["{missing}", "{folder}", "{binary}", "{file}", LONG],
    "--peer": ["me", "x", "💥", LONG],
}
"""What must be refused, by argument or option."""
NUMBERS = ["x", "1.5", "-1", "", "99999999999999999999x"]
ZERO_IS_GOOD = {"--seed", "--watch"}


def tries() -> Iterator[Any]:
    """(command, what is given instead of the good)."""
    for leaf in LEAVES.values():
        yield pytest.param(leaf, None, "--colour", id=f"{leaf.name} --colour")
        for parameter in leaf.parameters:
            key = next((text for text in parameter.opts if text.startswith("--")), str(parameter.name))
            values = list(BAD.get(key, ()))
            if key == "--json" and parameter.is_flag:
                values = []
            if parameter.bare_type() == "int":
                values += NUMBERS if key in ZERO_IS_GOOD else [*NUMBERS, "0"]
            for value in values:
                shown = f"{value[:12]}…" if len(value) > 40 else value
                yield pytest.param(leaf, key, value, id=f"{leaf.name} {key} {shown!r}")


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is found before anybody is asked over the network, and before the machine is measured."""

    def reached(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was reached")

    monkeypatch.setattr("spes_p2p.client.foreground.run_in_foreground", reached)
    monkeypatch.setattr("spes_p2p.client.estimate.gather.gather", reached)
    monkeypatch.setattr("spes_p2p.client.doctor.network.with_link", _nothing_found)
    monkeypatch.setattr("spes_p2p.client.doctor.machine.WRITTEN_BYTES", 1 << 10)


async def _nothing_found(*_: object) -> list[object]:
    return []


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """What a wrong path may lead to."""
    folder, empty, full = (tmp_path / name for name in ("folder", "empty", "full"))
    for path in (folder, empty, full):
        path.mkdir()
    (full / "precious.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "binary.bin").write_bytes(os.urandom(64) + b"\xff\xfe")
    (tmp_path / "run.toml").write_text("")
    names = {"folder": folder, "empty": empty, "full": full, "file": tmp_path / "file", "missing": tmp_path / "missing"}
    return {name: str(path) for name, path in names.items()} | {
        "binary": str(tmp_path / "binary.bin"),
        "run_toml": str(tmp_path / "run.toml"),
    }


def refused(answer: Any) -> None:
    assert "Traceback" not in answer.err and "internal error" not in answer.err, answer.err
    assert answer.code in OUR_CODES, (answer.code, answer.out, answer.err)
    if answer.code == 5 and not answer.err:
        # a report of checks: what fails is one line of it
        failed = [line for line in answer.out.splitlines() if line.startswith("fail ")]
        assert failed and all(" -> " in line for line in failed), answer.out
        return
    lines = answer.err.strip().splitlines()
    assert 1 <= len(lines) <= 2, answer.err


@pytest.mark.parametrize(("leaf", "key", "value"), list(tries()))
def test_wrong_input_is_refused_in_a_line_or_two(
    spes_p2p: Run, places: dict[str, str], leaf: Leaf, key: str | None, value: str
) -> None:
    words = list(leaf.path[1:])
    for parameter in leaf.parameters:
        # with a link, --run would mean nothing
        optional = parameter.name == "link" and key != "--run"
        if parameter.param_type_name == "argument" and (parameter.required or optional):
            good = GOOD.get(str(parameter.name), "nonsense")
            words.append((value if parameter.name == key else good).format_map(places))
    if key is None:
        words.append(value)
    elif key.startswith("--"):
        words.append(f"{key}={value.format_map(places)}")
    refused(spes_p2p(*words))


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=lambda leaf: leaf.name)
def test_one_word_too_many_is_refused(spes_p2p: Run, leaf: Leaf) -> None:
    refused(spes_p2p(*leaf.path[1:], "one", "word", "too", "many"))


READERS = sorted(
    name
    for name, leaf in LEAVES.items()
    if "--data-dir" in leaf.options and name.split()[1] in {"status", "leave", "ledger", "attach", "pause", "resume"}
)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_that_is_not_there_is_named_and_not_made(spes_p2p: Run, tmp_path: Path, name: str) -> None:
    answer = spes_p2p(*name.split()[1:], "--data-dir", tmp_path / "nothing")
    refused(answer)
    assert answer.code == 2 and str(tmp_path / "nothing") in answer.err
    assert not (tmp_path / "nothing").exists()
