"""Bringing blobs from peers, bounded by a moment at which they are no longer wanted; and a line that is too slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.keeping import Keeper
from spes_p2p.ports import BlobStore, Clock
from spes_p2p.protocol.head import Head
from spes_p2p.units import bytes_text


class Fetcher(Protocol):
    """What brings blobs: the transport."""

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob of at most `max_bytes` into the store. Raises BlobError, MachineError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The blobs of a node: where they lie, who brings them, and who says how long they stay."""

    blobs: BlobStore
    fetcher: Fetcher
    keeper: Keeper


async def all_unless(event: asyncio.Event, works: Sequence[Coroutine[Any, Any, bool]]) -> bool:
    """Whether all works came true before the event. Those that run when it comes, or when one raises, are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    stop = asyncio.create_task(event.wait())
    try:
        open_tasks = set(tasks)
        while open_tasks and not stop.done():
            done, _ = await asyncio.wait({stop, *open_tasks}, return_when=asyncio.FIRST_COMPLETED)
            open_tasks -= done
            for task in done:
                task.result()
        return not open_tasks and all(task.result() for task in tasks)
    finally:
        for task in (stop, *tasks):
            task.cancel()
        await asyncio.gather(stop, *tasks, return_exceptions=True)


class LineWatch:
    """Notices that rounds pass faster than this node's line brings their state (docs/protocol.md, section 8)."""

    ROUNDS = 2
    """So many rounds that pass while the state is loading are too many."""

    def __init__(self, clock: Clock, notify: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._notify = notify
        self._began_ms = self._adopted_ms = clock.now_ms()
        self._passed = 0

    def loaded(self) -> None:
        """The state is here."""
        self._passed = 0

    def adopted(self, head: Head, *, loading: bool) -> None:
        """A certificate came, perhaps while the state of the one before was still loading.

        Certificates that come in quick succession are those of rounds that were over before: this node catches up.
        """
        now_ms = self._clock.now_ms()
        catching_up = now_ms - self._adopted_ms < head.run.config.protocol.resend_ms
        self._adopted_ms = now_ms
        if catching_up or not loading:
            self._began_ms, self._passed = now_ms, 0
            return
        self._passed += 1
        if self._passed == self.ROUNDS:
            round_s = (now_ms - self._began_ms) / 1000 / self.ROUNDS
            sizes = head.run.sizes
            state_bytes = (
                sizes.num_parts * sizes.part_result_bytes
                + sum(len(row.blobs) for row in head.state.shards) * sizes.expert_blob_bytes
            )
            self._notify(
                "warning",
                f"{self.ROUNDS} rounds passed while the state was loading: this line is too slow for this run; "
                f"{bytes_text(state_bytes / round_s)}/s would do ({bytes_text(state_bytes)} within {round_s:.0f} s)",
            )
            self._began_ms, self._passed = now_ms, 0
