"""Flags, then environment, then file, then defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.client.settings import Choices, choose, data_paths, from_environment, from_flags, node_config
from spes_p2p.config import Limits
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.node.budgets.store import read_limits, write_limits


def test_flag_beats_environment_beats_file(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("threads = 1\ncapacity = 1\ngpu = 'none'\n")
    choices = choose(from_flags(threads=3), {"SPES_THREADS": "2", "SPES_CAPACITY": "2"})
    assert (choices.threads, choices.capacity, choices.gpu) == (3, 2, "none")


def test_missing_file_of_the_user_says_nothing() -> None:
    assert choose(Choices(), {}) == Choices()


def test_missing_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        choose(Choices(), {"SPES_CONFIG": str(tmp_path / "x.toml")})


def test_list_replaces_the_list_of_a_lower_place() -> None:
    choices = choose(
        from_flags(listen=["/ip4/127.0.0.1/tcp/1"]), {"SPES_LISTEN": "/ip4/1.1.1.1/tcp/2 /ip4/1.1.1.1/tcp/3"}
    )
    assert choices.listen == ("/ip4/127.0.0.1/tcp/1",)


def test_empty_flags_count_as_not_given() -> None:
    assert from_flags(listen=[], data=None, threads=None) == Choices()


def test_environment_knows_every_choice_and_splits_lists() -> None:
    choices = from_environment(
        {
            "SPES_DATA_DIR": "/d",
            "SPES_RUN": "ab",
            "SPES_GPU": "0",
            "SPES_DATA": "/a:/b c",
            "SPES_LISTEN": "/x /y",
            "SPES_ANNOUNCE": "/z",
            "SPES_BOOTSTRAP": "/w",
            "SPES_CAPACITY": "2",
            "SPES_THREADS": "4",
            "SPES_FROZEN_FORMAT": "bf16",
            "SPES_MOMENTS": "int8",
            "SPES_MEMORY": "10GB",
            "SPES_COMPILE": "true",
            "SPES_UPLOAD": "1MB/s",
            "SPES_DOWNLOAD": "off",
            "SPES_MONTHLY": "100GB",
            "SPES_HOURS": "22:00-07:00",
            "SPES_GPU_SHARE": "50%",
            "SPES_GPU_POWER": "200W",
            "SPES_IDLE_ONLY": "yes",
            "SPES_PAUSE_ON_BATTERY": "0",
        }
    )
    assert choices == Choices(
        data_dir=Path("/d"),
        run="ab",
        gpu="0",
        data=(Path("/a"), Path("/b c")),
        listen=("/x", "/y"),
        announce=("/z",),
        bootstrap=("/w",),
        capacity=2,
        threads=4,
        frozen_format="bf16",
        moments="int8",
        memory=10_000_000_000,
        compile=True,
        upload="1MB/s",
        download="off",
        monthly="100GB",
        hours="22:00-07:00",
        gpu_share="50%",
        gpu_power="200W",
        idle_only=True,
        pause_on_battery=False,
    )
    with pytest.raises(ConfigError, match="environment variable SPES_HOURS: 'night'"):
        from_environment({"SPES_HOURS": "night"})


def test_limits_that_are_named_change_those_that_the_folder_remembers(tmp_path: Path) -> None:
    write_limits(tmp_path, Limits(upload=1_000_000, hours="22:00-07:00", idle_only=True))
    unnamed = node_config(Choices(), data_dir=tmp_path, devices=("cpu",), invite_seed=None)
    assert unnamed.limits is None  # the node reads them itself
    flags = from_flags(upload="2MB/s", hours="off", idle_only=False, gpu_share="50%")
    named = node_config(flags, data_dir=tmp_path, devices=("cpu",), invite_seed=None)
    assert named.limits == Limits(upload=2_000_000, gpu_share=0.5)
    assert read_limits(tmp_path).upload == 1_000_000


def test_node_config_holds_what_was_chosen_and_defaults_for_the_rest(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words")
    choices = Choices(threads=2, data=(text,), rounds=5, run="ab", gpu="none")
    config = node_config(choices, data_dir=tmp_path, devices=("cpu",), invite_seed=b"s" * 32)
    assert (config.threads, config.data, config.stop_after_round, config.device) == (2, (text,), 5, "cpu")
    assert (config.listen, config.capacity, config.invite_seed) == (("/ip4/0.0.0.0/tcp/0",), None, b"s" * 32)


def test_the_first_device_is_the_nodes_and_the_others_are_further_ones(tmp_path: Path) -> None:
    config = node_config(Choices(), data_dir=tmp_path, devices=("cuda:2", "cuda:0"), invite_seed=None)
    assert (config.device, config.more_devices) == ("cuda:2", ("cuda:0",))


@pytest.mark.parametrize(("text", "size"), [("10GB", 10**10), ("6GiB", 6 * 2**30), ("1.5 gb", 1_500_000_000)])
def test_memory_is_given_in_sizes_that_people_write(tmp_path: Path, text: str, size: int) -> None:
    config = node_config(from_flags(memory=text), data_dir=tmp_path, devices=("cpu",), invite_seed=None)
    assert config.memory_bytes == size


@pytest.mark.parametrize("text", ["10", "ten", "10 apples", "-3GB", "", "9EiB", "99999999999999999999GB"])
def test_memory_that_is_no_sensible_size_is_refused_with_a_good_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--memory.* such as 10GB"):
        from_flags(memory=text)


def test_compiling_is_for_gpus(tmp_path: Path) -> None:
    choices = from_flags(compile=True)
    assert node_config(choices, data_dir=tmp_path, devices=("cuda:0",), invite_seed=None).compile
    with pytest.raises(ConfigError, match="--compile needs a GPU"):
        node_config(choices, data_dir=tmp_path, devices=("cpu",), invite_seed=None)
    with pytest.raises(ConfigError, match="several GPUs"):
        node_config(choices, data_dir=tmp_path, devices=("cuda:0", "cuda:1"), invite_seed=None)
    no_compile = choose(from_flags(compile=False), {"SPES_COMPILE": "1"})
    assert not node_config(no_compile, data_dir=tmp_path, devices=("cpu",), invite_seed=None).compile


def test_data_paths_become_absolute_and_keep_their_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    assert data_paths((Path("a.txt"), Path("*.txt"))) == (tmp_path / "a.txt", tmp_path / "*.txt")


def test_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text file matches"):
        data_paths((tmp_path / "*.txt",))
