"""Which processes were started from here on: what a test must leave nothing of."""

from __future__ import annotations

import psutil


class Offspring:
    """Children of this process, and theirs, that were not there when this object was made.

    Others may be there for good: what multiprocessing begins for one test, its fork server, ends with the interpreter.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def alive(self) -> list[psutil.Process]:
        """Those that run now."""
        return [child for child in psutil.Process().children(recursive=True) if child not in self._before]
