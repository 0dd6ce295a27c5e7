"""The demo's parts: configuration, texts, processes, figures."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from spes_p2p.client.demo.config import demo_config, write_toml
from spes_p2p.client.demo.processes import Child, Leftovers, child_environment
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.config import RunConfig
from spes_p2p.errors import SpesError, UsageError


@pytest.mark.parametrize(("num_peers", "num_shards"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_there_is_a_shard_for_each_peer(num_peers: int, num_shards: int) -> None:
    assert demo_config(num_peers, 8).num_shards == num_shards


def test_schedule_spans_the_rounds_in_which_peers_train() -> None:
    config = demo_config(4, 8)
    assert config.training.total_steps == 7 * config.training.inner_steps_at(0)


def test_merges_happen_within_the_demo() -> None:
    training = demo_config(4, 8).training
    assert training.merge.interval_steps <= training.merge.warmup_steps < training.total_steps


def test_more_peers_than_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="--peers 9"):
        demo_config(9, 8)


def test_written_configuration_is_read_back_the_same(tmp_path: Path) -> None:
    config = demo_config(5, 3)
    write_toml(config, tmp_path / "run.toml")
    assert RunConfig.from_toml(tmp_path / "run.toml") == config


def test_peers_get_enough_text_and_no_file_twice(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    deal_texts(folders, text_bytes=30_000)
    texts = [path.read_bytes() for folder in folders for path in folder.iterdir()]
    assert len(texts) == len(set(texts))
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert all(30_000 <= size < 70_000 for size in sizes)


def test_texts_are_the_same_every_time(tmp_path: Path) -> None:
    for name in "ab":
        deal_texts([tmp_path / name], text_bytes=20_000)
    one, two = (sorted(path.read_bytes() for path in (tmp_path / name).iterdir()) for name in "ab")
    assert one == two


def test_children_do_not_see_the_users_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPES_RUN", "mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    environment = child_environment(tmp_path)
    assert "SPES_RUN" not in environment
    assert environment["SPES_HOME"] == str(tmp_path)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_child_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    child = Child("peer 3", ["join", "nonsense"], tmp_path / "out.log")
    child.wait_or_kill(until_s=float("inf"))
    assert child.exit_code() == 2
    with pytest.raises(SpesError, match="peer 3 ended with exit code 2: invite link") as caught:
        child.check()
    assert caught.value.exit_code == 2


def test_what_is_left_over_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SpesError, match=f"port {port}"):
            Leftovers(ports={port}).check_gone()
    Leftovers(ports={port}).check_gone()


def test_a_connection_that_lingers_is_no_port_left_over() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # who closes first keeps the connection, in TIME_WAIT
            assert client.recv(1) == b""
    Leftovers(ports={port}).check_gone()


def test_signal_ends_a_child(tmp_path: Path) -> None:
    child = Child("the command", ["--help"], tmp_path / "out.log")
    child.ask_to_end()
    child.wait_or_kill(until_s=float("inf"))
    assert child.exit_code() in (0, -signal.SIGTERM)
