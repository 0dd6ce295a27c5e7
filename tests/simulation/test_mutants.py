"""Each wrong variant of the code fails the tests that it names, which the right code passes.

A test is named as `path under tests/::function`; it takes no fixture and runs here as a plain function.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from spes_p2p.testing.mutants import MUTANTS, Mutant
from spes_p2p.testing.swarm import InvariantError

TESTS = Path(__file__).parent.parent
CAUGHT = [(mutant, name) for mutant in MUTANTS for name in mutant.caught_by]

pytestmark = pytest.mark.mutant


@cache
def module_at(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"judge_{Path(path).stem}", TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(name: str) -> Callable[[], None]:
    path, _, function = name.partition("::")
    found: Callable[[], None] = getattr(module_at(path), function)
    return found


def test_there_are_mutants_of_every_part_of_the_protocol_and_no_two_of_one_name() -> None:
    assert len(MUTANTS) >= 14
    assert len({mutant.name for mutant in MUTANTS}) == len({mutant.sentence for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.caught_by for mutant in MUTANTS)


@pytest.mark.parametrize("name", sorted({name for _, name in CAUGHT}))
def test_the_right_code_passes(name: str) -> None:
    judge(name)()


@pytest.mark.parametrize(("mutant", "name"), CAUGHT, ids=[f"{mutant.name}-{name}" for mutant, name in CAUGHT])
def test_the_mutant_is_caught(mutant: Mutant, name: str) -> None:
    function = judge(name)
    with mutant.applied(), pytest.raises((AssertionError, InvariantError, pytest.fail.Exception)):
        function()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_leaves_nothing_behind(mutant: Mutant) -> None:
    patched = [(owner, name, vars(owner)[name]) for owner, name, _ in mutant.patches()]
    with mutant.applied():
        assert all(vars(owner)[name] is not right for owner, name, right in patched)
    assert all(vars(owner)[name] is right for owner, name, right in patched)
