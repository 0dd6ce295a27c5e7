"""The files whose results must agree to the bit keep to forms that give the same bits everywhere.

Fused and reordered arithmetic differs between machines, versions and thread counts. In these files an arithmetic
statement is therefore one numpy ufunc, out of place, with its dtype stated; no reduction but comparisons; no torch.
"""

import ast
from pathlib import Path

import pytest

import spes_p2p

TRAINING = Path(spes_p2p.__file__).parent / "training"
FILES = [TRAINING / name for name in ("aggregate.py", "merge.py", "codecs.py", "outer.py")]

FORBIDDEN_NAMES = {
    *("torch", "hivemind", "math", "scipy"),
    *("addcmul", "addcdiv", "lerp", "einsum", "dot", "vdot", "inner", "matmul", "tensordot", "linalg"),
    *("sum", "nansum", "mean", "nanmean", "average", "std", "var", "prod", "cumsum", "fsum", "reduce", "accumulate"),
    *("fma", "power", "exp", "log", "sqrt", "square", "float_power", "float16", "longdouble", "float128"),
}
ARITHMETIC_UFUNCS = {
    *("add", "subtract", "multiply", "divide", "rint"),
    *("left_shift", "right_shift", "bitwise_and", "bitwise_or"),
}
ARRAY_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult, ast.LShift, ast.RShift)


def problems(source: str) -> list[str]:
    """What in a source breaks the rules, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            names = {part for module in modules for part in module.split(".")} | {name.name for name in node.names}
            found += [f"{line}: imports {name}" for name in sorted(names & FORBIDDEN_NAMES)]
            if isinstance(node, ast.ImportFrom) and node.module == "numpy":
                found.append(f"{line}: imports from numpy, which hides its ufuncs from this test")
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            found.append(f"{line}: {node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
            found.append(f"{line}: {node.func.id}")
        elif isinstance(node, ast.MatMult):
            found.append("@")
        elif isinstance(node, ast.keyword) and node.arg in {"alpha", "out", "where"}:
            found.append(f"{node.value.lineno}: {node.arg}=")
        elif isinstance(node, ast.AugAssign):
            found.append(f"{line}: in place")
        elif isinstance(node, ast.Call) and ufunc_of(node) and not states_dtype(node):
            found.append(f"{line}: {ufunc_of(node)} without dtype")
        elif isinstance(node, ast.BinOp | ast.Call):
            found += [f"{line}: Python float" for operand in operands(node) if is_float(operand)]
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
            found += [f"{line}: writes into an array" for target in node.targets if is_array_place(target)]
        if isinstance(node, ast.stmt) and (count := num_operations(node)) > 1:
            found.append(f"{line}: {count} operations in one statement")
    return found


def ufunc_of(node: ast.AST) -> str | None:
    """Name of the arithmetic ufunc that a call is, if it is one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ARITHMETIC_UFUNCS:
        return node.func.attr if isinstance(node.func.value, ast.Name) and node.func.value.id == "np" else None
    return None


def states_dtype(node: ast.Call) -> bool:
    return any(keyword.arg == "dtype" for keyword in node.keywords)


def operands(node: ast.AST) -> list[ast.expr]:
    """What an operation works on: both sides of an operator, the arguments of a ufunc."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return node.args if isinstance(node, ast.Call) and ufunc_of(node) else []


def is_float(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return is_float(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "float"
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def is_array_place(target: ast.expr) -> bool:
    """Whether an assignment's target is a part of an array: a slice or several indices; a dictionary's key is not."""
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice | ast.Tuple)


def num_operations(statement: ast.stmt) -> int:
    """Arithmetic operations of a statement, without those of the statements inside it."""
    count, open_nodes = 0, [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while open_nodes:
        node = open_nodes.pop()
        count += isinstance(node, ast.BinOp) and isinstance(node.op, ARRAY_OPERATORS)
        count += ufunc_of(node) is not None
        open_nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return count


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_of_agreed_values_keep_the_bit_rules(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch import add",
        "import math",
        "from numpy import add",
        "x = a @ b",
        "x = np.add(a, b)",
        "x = np.add(np.multiply(a, w, dtype=np.float64), b, dtype=np.float64)",
        "x = a * w + b",
        "x += y",
        "x[1:3] = y",
        "x = np.add(a, b, dtype=np.float64, out=a)",
        "x = np.multiply(a, 0.5, dtype=np.float64)",
        "x = np.multiply(a, float(w), dtype=np.float64)",
        "x = a * 0.5",
        "x = a * -0.5",
        "x = a.sum()",
        "x = np.sum(a, dtype=np.float64)",
        "x = sum(parts)",
        "x = np.mean(a)",
        "x = np.add.reduce(a)",
        "x = np.einsum('i,i', a, b)",
        "x = a.add(b, alpha=w)",
        "x = np.linalg.norm(a)",
        "x = a.dot(b)",
        "x = y.lerp(z, w)",
    ],
)
def test_each_forbidden_form_is_found(source: str) -> None:
    assert problems(source) != []


def test_allowed_forms_are_not_found() -> None:
    allowed = "wide = a.astype(np.float64)\nx = np.add(wide, b, dtype=np.float64)\ntensors[name] = x\ny = x.copy()"
    assert problems(allowed) == []
