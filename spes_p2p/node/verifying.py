"""Signatures in bulk, on all processors: the Ed25519 code lets other threads run while it computes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from spes_p2p.ports import Verifier
from spes_p2p.protocol.certificate import Check, verify_checks

_CHECKS_PER_TASK = 256


class Verification:
    """Threads that verify signatures; `close` ends them."""

    def __init__(self, verifier: Verifier, num_threads: int | None = None) -> None:
        """`num_threads`: as many as there are processors if not given."""
        self._verifier = verifier
        self._threads = ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="verify")

    def check(self, checks: Sequence[Check]) -> None:
        """Raises RemoteProtocolError if one of the signatures is not its peer's. Blocks."""
        slices = [checks[at : at + _CHECKS_PER_TASK] for at in range(0, len(checks), _CHECKS_PER_TASK)]
        for _ in self._threads.map(lambda part: verify_checks(part, self._verifier), slices):
            pass

    async def check_soon(self, checks: Sequence[Check]) -> None:
        """The same without blocking the event loop."""
        await asyncio.to_thread(self.check, checks)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
