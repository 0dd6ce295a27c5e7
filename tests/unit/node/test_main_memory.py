"""Free main memory is also bounded by the limits of the container."""

from pathlib import Path

import pytest

from spes_p2p.node.main_memory import free_in_cgroups, free_main_memory


def group(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own").write_text("0::/user/app\n")
    return tmp_path / "own"


def test_every_group_above_counts_with_its_limit(tmp_path: Path, own: Path):
    root = tmp_path / "cgroup"
    group(root / "user", "1000", 400)
    group(root / "user" / "app", "800", 700, cached=50)
    assert list(free_in_cgroups(root, own)) == [150, 600]


def test_a_group_in_a_container_is_the_root(tmp_path: Path):
    own = tmp_path / "own"
    own.write_text("0::/\n")
    group(tmp_path / "cgroup", "1000", 1300)
    assert list(free_in_cgroups(tmp_path / "cgroup", own)) == [0]


@pytest.mark.parametrize("limit", ["max", "nonsense"])
def test_groups_without_a_limit_are_left_out(tmp_path: Path, own: Path, limit: str):
    group(tmp_path / "cgroup" / "user" / "app", limit, 10)
    assert list(free_in_cgroups(tmp_path / "cgroup", own)) == []


def test_a_system_without_groups_has_what_is_free(tmp_path: Path):
    assert list(free_in_cgroups(tmp_path, tmp_path / "missing")) == []
    assert free_main_memory() > 0
