"""The wheel holds every module and data file under `spes_p2p`, and nothing else."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA_SUFFIXES = {".tcss", ".toml", ".json", ".typed"}
# Distributions whose module has another name.
MODULES = {"nvidia-ml-py": "pynvml", "textual-plotext": "textual_plotext", "textual-serve": "textual_serve"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Names of the files in a wheel that was built from a copy of the sources."""
    out = tmp_path_factory.mktemp("wheel")
    tree = out / "tree"
    tree.mkdir()
    for name in ("spes_p2p", "client", "bootstrap", "pyproject.toml", "README.md", "LICENSE"):
        # `cp -a` keeps the links, which is what a checkout has.
        subprocess.run(["cp", "-a", str(ROOT / name), str(tree)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(out), str(tree)], check=True, capture_output=True)
    (wheel,) = out.glob("spes_p2p-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


def source_names() -> set[str]:
    """Where every module and data file of the three folders belongs in a wheel."""
    names = set()
    for folder, inside in (("spes_p2p", ""), ("client", "spes_p2p"), ("bootstrap", "spes_p2p")):
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] in (("spes_p2p", "client"), ("spes_p2p", "bootstrap")):
                continue
            if path.is_file() and (path.suffix == ".py" or path.suffix in DATA_SUFFIXES or path.name == "py.typed"):
                names.add((Path(inside) / relative).as_posix())
    return names


def test_wheel_holds_every_module_and_data_file(wheel_names: frozenset[str]) -> None:
    assert source_names() <= wheel_names


def test_wheel_holds_the_style_sheet_and_the_type_marker(wheel_names: frozenset[str]) -> None:
    assert {"spes_p2p/py.typed", "spes_p2p/client/ui/app.tcss", "spes_p2p/client/demo/run.toml"} <= wheel_names


def test_wheel_takes_no_name_but_its_own(wheel_names: frozenset[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"spes_p2p"}


@pytest.mark.parametrize("folder", ["client", "bootstrap"])
def test_bare_import_is_refused(folder: str) -> None:
    spec = importlib.util.spec_from_file_location(folder, ROOT / folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"import spes_p2p.{folder} instead"):
        spec.loader.exec_module(module)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    imported = set()
    for folder in ("spes_p2p", "client", "bootstrap"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    imported.add(node.module.split(".")[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    declared = {re.split(r"[<>=~! ]", requirement)[0] for requirement in requirements}
    assert {MODULES.get(name, name) for name in declared} == imported - sys.stdlib_module_names - {"spes_p2p"}


def test_entry_points_name_functions_that_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"spes-p2p", "spes-p2p-bootstrap"}
    for target in scripts.values():
        module, function = target.split(":")
        path = ROOT.joinpath(*module.removeprefix("spes_p2p.").split(".")).with_suffix(".py")
        assert f"def {function}(" in path.read_text()


def test_torch_is_pinned_to_the_version_that_works_with_hivemind() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
