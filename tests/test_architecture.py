"""Holds the lines of the architecture: who imports whom, what the pure core may know, and how large a file may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The real folders: spes_p2p/client and spes_p2p/bootstrap are links to the other two.
FOLDERS = ("spes_p2p", "client", "bootstrap")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

BASE = frozenset({"ids", "errors", "digests", "crypto", "ports", "config", "units"})
CORE = BASE | {"protocol", "model"}
# Package -> the other packages of spes_p2p that it may import.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset(),
    "ids": frozenset(),
    "errors": frozenset({"ids"}),
    "digests": frozenset({"ids", "errors"}),
    "crypto": frozenset({"ids", "errors", "digests"}),
    "ports": frozenset({"ids", "errors", "digests"}),
    "config": frozenset({"ids", "errors", "digests"}),
    "ending": frozenset(),
    "systemd": frozenset(),
    "units": frozenset(),
    "protocol": BASE,
    "model": BASE,
    "storage": BASE | {"protocol"},
    "training": BASE | {"model", "storage"},
    "network": BASE | {"protocol", "storage"},
    "node": CORE | {"network", "storage", "training"},
    "interop": BASE | {"model", "training", "storage"},
    "testing": CORE | {"network", "storage", "training", "node"},
    "client": CORE | {"network", "storage", "training", "node", "interop", "testing", "bootstrap", "ending", "systemd"},
    "bootstrap": BASE | {"network", "storage", "protocol", "ending", "systemd"},
}
# Single files that see more than their package, each with its reason.
EXCEPTIONS: dict[str, frozenset[str]] = {
    "spes_p2p/testing/live.py": frozenset({"client"}),  # starts the product's own processes, as the demo does
    "bootstrap/chains.py": frozenset({"node"}),  # follows and serves a run's chain by the members' own code
    "bootstrap/node.py": frozenset({"node"}),  # the clock and the threads that go with that
}
# What may not be known in a package: not even lazily, inside a function.
FORBIDDEN_LIBRARIES: dict[str, frozenset[str]] = {
    "protocol": frozenset(
        {"asyncio", "torch", "hivemind", "numpy", "time", "datetime", "random", "secrets", "socket", "threading", "os"}
    ),
    "bootstrap": frozenset({"torch"}),
    "storage": frozenset({"asyncio", "torch", "hivemind"}),
}
# The one file that may end an exception of any kind: the command line, which reports it.
CATCH_ALL = {"client/cli.py"}
SILENCED = re.compile(r"# (noqa|type: ignore)(: [A-Z0-9]+|\[[a-z-]+\])  # \w")
HIVEMIND_IMPORTERS = {"spes_p2p/network/p2p.py", "spes_p2p/network/guards.py"}
UNSAFE_LIBRARIES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# What the terminal UI may see of the library.
UI_MAY_IMPORT = (
    "spes_p2p.node.snapshot",
    "spes_p2p.node.control_client",
    "spes_p2p.node.budgets.client",
    "spes_p2p.node.budgets.limits",  # how limits are written: one parser, and its words, for commands and UI
    "spes_p2p.client.ui",
    "spes_p2p.client.output",
    "spes_p2p.client.standing",
    "spes_p2p.errors",
    "spes_p2p.units",
)


@dataclass(frozen=True)
class Source:
    """One module: its path from the root, the package it belongs to, and its tree."""

    path: str
    package: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, absolute dotted name) of everything imported anywhere in the module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] in (("spes_p2p", "client"), ("spes_p2p", "bootstrap")):
                continue
            parts = relative.with_suffix("").parts
            inside = parts[1:] if parts[0] == "spes_p2p" else parts
            package = "" if inside == ("__init__",) else inside[0]
            text = path.read_text()
            found.append(Source(relative.as_posix(), package, text, ast.parse(text)))
    return tuple(found)


def of_package(package: str) -> list[Source]:
    return [source for source in sources() if source.package == package]


def complaints(lines: list[str]) -> str:
    return "\n" + "\n".join(lines)


def test_every_package_has_its_place_in_the_import_rules() -> None:
    assert {source.package for source in sources()} <= set(MAY_IMPORT)


def test_packages_import_only_what_lies_below_them() -> None:
    wrong = []
    for source in sources():
        allowed = MAY_IMPORT[source.package] | {source.package} | EXCEPTIONS.get(source.path, frozenset())
        for line, name in source.imports():
            top, _, rest = name.partition(".")
            if top in ("client", "bootstrap"):
                wrong.append(f"{source.path}:{line}: import spes_p2p.{top}, not {top}")
            if top != "spes_p2p" or rest == "__version__":
                continue
            if rest.split(".")[0] not in allowed:
                wrong.append(f"{source.path}:{line}: {source.package} may not import {name}")
    assert not wrong, complaints(wrong)


def test_pure_packages_know_no_shell_library() -> None:
    wrong = [
        f"{source.path}:{line}: {name}"
        for package, forbidden in FORBIDDEN_LIBRARIES.items()
        for source in of_package(package)
        for line, name in source.imports()
        if name.split(".")[0] in forbidden
    ]
    assert not wrong, complaints(wrong)


def test_only_the_network_guards_import_hivemind() -> None:
    importers = {
        source.path for source in sources() for _, name in source.imports() if name.split(".")[0] == "hivemind"
    }
    assert importers <= HIVEMIND_IMPORTERS


def test_nothing_of_hivemind_moe_is_named() -> None:
    wrong = [source.path for source in sources() for _, name in source.imports() if name.startswith("hivemind.moe")]
    assert not wrong


def test_nothing_can_unpickle() -> None:
    wrong = []
    for source in sources():
        wrong += [
            f"{source.path}:{n}: {name}" for n, name in source.imports() if name.split(".")[0] in UNSAFE_LIBRARIES
        ]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save", "numpy.load"):
                wrong.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{source.path}:{node.lineno}: allow_pickle")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                wrong.append(f"{source.path}:{node.lineno}: {node.func.id}()")
    assert not wrong, complaints(wrong)


def test_the_terminal_ui_sees_the_library_through_snapshots_alone() -> None:
    wrong = [
        f"{source.path}:{line}: {name}"
        for source in of_package("client")
        if source.path.startswith("client/ui/")
        for line, name in source.imports()
        if name.split(".")[0] == "spes_p2p" and not name.startswith(UI_MAY_IMPORT)
    ]
    assert not wrong, complaints(wrong)


def test_the_protocol_never_uses_the_builtin_hash() -> None:
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in of_package("protocol")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hash", "id")
    ]
    assert not wrong, complaints(wrong)


def test_the_protocol_never_iterates_an_unsorted_set() -> None:
    wrong = [
        f"{source.path}:{line}: iterates a set; use sorted()"
        for source in of_package("protocol")
        for line in unsorted_set_iterations(source.tree)
    ]
    assert not wrong, complaints(wrong)


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("for x in {1, 2}: pass", 1),
        ("s = set(y)\nfor x in s: pass", 1),
        ("s: frozenset[int] = f()\nz = [x for x in s]", 1),
        ("def f(s: set[int]):\n    return tuple(s)", 1),
        ("s = set(y)\nfor x in s | t: pass", 1),
        ("s = set(y)\nfor x in sorted(s): pass", 0),
        ("s = set(y)\nok = all(x > 1 for x in s)", 0),
        ("s = set(y)\nt = {x + 1 for x in s}", 0),
        ("for x in [1, 2]: pass", 0),
    ],
)
def test_the_search_for_set_iterations_finds_them(text: str, num_found: int) -> None:
    assert len(list(unsorted_set_iterations(ast.parse(text)))) == num_found


def test_files_can_be_read_at_one_sitting() -> None:
    lengths = {source.path: source.text.count("\n") for source in sources()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    ordered = sorted(lengths.values())
    assert ordered[len(ordered) // 2] < 200


def test_functions_can_be_read_at_one_look() -> None:
    wrong = [
        f"{source.path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not wrong, complaints(wrong)


def test_assert_never_validates() -> None:
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not wrong, complaints(wrong)


def test_whoever_catches_everything_raises_it_again() -> None:
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources()
        if source.path not in CATCH_ALL
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and catches_everything(node) and not ends_with_raise(node)
    ]
    assert not wrong, complaints(wrong)


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def ends_with_raise(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_every_silenced_complaint_says_why() -> None:
    files = [path for folder in (*FOLDERS, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"# (noqa|type: ignore)\b", line) and not SILENCED.search(line)
    ]
    assert not wrong, complaints(wrong)


# Calls whose result shows the order of what they iterate, and calls whose result does not.
ORDER_KEEPING = {"list", "tuple", "enumerate", "zip", "map", "filter", "iter"}
ORDER_FREE = {"sorted", "any", "all", "sum", "min", "max", "len", "set", "frozenset"}


def unsorted_set_iterations(tree: ast.Module) -> Iterator[int]:
    """Lines where a set is iterated and the order can matter. Knows sets by literal, call, annotation, assignment."""
    names = set(set_names(tree))
    order_free = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDER_FREE
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and is_set(node.iter, names):
            yield node.lineno
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and id(node) not in order_free:
            yield from (node.lineno for part in node.generators if is_set(part.iter, names))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ORDER_KEEPING:
            yield from (node.lineno for argument in node.args if is_set(argument, names))


def set_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_set(node.value, set()):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and annotates_set(node.annotation):
            yield node.target.id
        elif isinstance(node, ast.arg) and node.annotation is not None and annotates_set(node.annotation):
            yield node.arg


def annotates_set(annotation: ast.expr) -> bool:
    text = ast.unparse(annotation)
    return text.split("[")[0] in ("set", "frozenset", "Set", "AbstractSet")


def is_set(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_set(node.left, names) or is_set(node.right, names)
    return isinstance(node, ast.Name) and node.id in names
