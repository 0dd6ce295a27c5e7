"""Where the UI's snapshots come from, and where its wishes go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Protocol

from spes_p2p.errors import UnreachableError
from spes_p2p.node import control_client
from spes_p2p.node.budgets import client as budgets
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot


class Feed(Protocol):
    """One node to look at. What asks something of it raises SpesError when the node does not answer."""

    @property
    def name(self) -> str:
        """What the UI calls it, such as `peer 2`; empty if there is only one."""
        ...

    def updates(self, after: int) -> AsyncIterator[NodeSnapshot | LogEvent]:
        """Snapshots as they change and log lines numbered above `after`. Raises SpesError when the node is silent."""
        ...

    async def leave(self) -> None:
        """Ask the node to leave properly."""
        ...

    async def pause(self) -> None:
        """Ask the node to hold its training."""
        ...

    async def resume(self) -> None:
        """Ask the node to train again."""
        ...

    async def change_limits(self, changes: Mapping[str, str]) -> None:
        """Ask the node to change limits, name -> text as people write it; a text that is wrong is an error, too."""
        ...

    def exit_code(self) -> int | None:
        """How the node ended; None while it runs, or if nobody can know."""
        ...

    def is_running(self) -> bool:
        """Whether there is a node, be it silent."""
        ...


class ControlFeed:
    """A node in another process, through its local API: if it hangs, the UI does not."""

    def __init__(
        self,
        data_dir: Path,
        *,
        name: str = "",
        pid: int | None = None,
        exit_code: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._data_dir = data_dir
        self._name = name
        self._pid = pid
        self._exit_code = exit_code

    @property
    def name(self) -> str:
        """What the UI calls it."""
        return self._name

    async def updates(self, after: int) -> AsyncIterator[NodeSnapshot | LogEvent]:
        """See `Feed`."""
        if self._pid is not None and control_client.running_pid(self._data_dir) != self._pid:
            raise UnreachableError("the node is starting: it looks for somebody who knows the run")
        async for update in control_client.stream(self._data_dir, after):
            yield update

    async def leave(self) -> None:
        """See `Feed`."""
        await asyncio.to_thread(control_client.request_leave, self._data_dir)

    async def pause(self) -> None:
        """See `Feed`."""
        await asyncio.to_thread(control_client.request_pause, self._data_dir)

    async def resume(self) -> None:
        """See `Feed`."""
        await asyncio.to_thread(control_client.request_resume, self._data_dir)

    async def change_limits(self, changes: Mapping[str, str]) -> None:
        """See `Feed`."""
        await asyncio.to_thread(budgets.change_limits, self._data_dir, changes)

    def exit_code(self) -> int | None:
        """See `Feed`."""
        return self._exit_code()

    def is_running(self) -> bool:
        """See `Feed`."""
        return control_client.running_pid(self._data_dir) is not None
