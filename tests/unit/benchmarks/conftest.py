import sys
from importlib import util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="session")
def benchmark_of():
    """A file of `benchmarks/`, by name, as a module. It is no package, so that it can be started as it lies."""

    def load(name):
        spec = util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
        module = util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        return module

    return load
