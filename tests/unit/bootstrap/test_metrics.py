"""Figures as Prometheus reads them, and the flags that lead to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.bootstrap import cli
from spes_p2p.bootstrap.flags import size_of
from spes_p2p.bootstrap.health import check
from spes_p2p.bootstrap.metrics import Metric, render, sum_of
from spes_p2p.bootstrap.options import parse_metrics
from spes_p2p.bootstrap.ports import LastingPorts
from spes_p2p.errors import LocalStateError, UsageError


def test_figures_have_help_type_and_labels_and_unknown_ones_are_left_out() -> None:
    text = render(
        (
            Metric(name="peers", help="Peers.", kind="gauge", value=3),
            Metric(name="relayed", help="Unknown.", kind="counter"),
            Metric(name="refused", help="Refused.", kind="counter", label="limit", values={'a"b': 1, "c": 2.5}),
        )
    )
    assert text.splitlines() == [
        "# HELP spes_bootstrap_peers Peers.",
        "# TYPE spes_bootstrap_peers gauge",
        "spes_bootstrap_peers 3",
        "# HELP spes_bootstrap_refused Refused.",
        "# TYPE spes_bootstrap_refused counter",
        'spes_bootstrap_refused{limit="a\\"b"} 1',
        'spes_bootstrap_refused{limit="c"} 2.5',
    ]
    assert sum_of(text, "spes_bootstrap_refused") == 3.5
    assert sum_of(text, "spes_bootstrap_ref") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("off", None),
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("[::1]:9464", ("::1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_a_place_for_metrics_is_read(text: str, place: tuple[str, int] | None) -> None:
    assert parse_metrics(text) == place


@pytest.mark.parametrize("text", ["", "9464", "host:1", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "on"])
def test_anything_else_is_refused_with_a_good_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"good: 127\.0\.0\.1:9464"):
        parse_metrics(text)


@pytest.mark.parametrize(("text", "size"), [("10GB", 10**10), ("1 KiB", 1024), ("500000", 500_000)])
def test_a_size_is_read(text: str, size: int) -> None:
    assert size_of("--mirror", text, 0) == size


@pytest.mark.parametrize(
    "flags",
    [
        ["--mirror", "much"],
        ["--cache", "0"],
        ["--peer-rate", "-1MB"],
        ["--all-rate", "x"],
        ["--peer-requests", "0"],
        ["--all-requests", "nan"],
        ["--metrics", "somewhere"],
    ],
)
def test_wrong_flags_are_named_in_a_line_and_make_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli.run(["--data-dir", str(tmp_path / "boot"), *flags]) == 2
    captured = capsys.readouterr()
    assert flags[0] in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "boot").exists()


def test_ports_are_chosen_once_and_one_serves_all_transports(tmp_path: Path) -> None:
    listen = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/5")
    chosen = LastingPorts(tmp_path / "ports.json").listen(listen)
    ports = [address.split("/")[4] for address in chosen]
    assert ports[0] == ports[1] != "0"
    assert ports[2] == "5"
    again = LastingPorts(tmp_path / "ports.json")
    assert again.listen(listen) == chosen
    metrics = again.metrics("127.0.0.1", 0)
    assert LastingPorts(tmp_path / "ports.json").metrics("127.0.0.1", 0) == metrics
    assert again.metrics("127.0.0.1", 77) == 77


@pytest.mark.parametrize("content", ["", "[]", '{"a": 0}', '{"a": "x"}'])
def test_a_damaged_file_of_ports_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "ports.json").write_text(content)
    with pytest.raises(LocalStateError, match=r"ports\.json"):
        LastingPorts(tmp_path / "ports.json")


def test_the_health_of_a_node_that_is_not_there_is_bad(tmp_path: Path) -> None:
    assert check(tmp_path)[0] is False
    (tmp_path / "http.json").write_text('{"url": "http://127.0.0.1:9"}')
    assert check(tmp_path)[0] is False
