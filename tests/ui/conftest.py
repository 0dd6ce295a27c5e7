"""The terminal UI in a terminal that is not there, and feeds without a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from textual.app import App

from spes_p2p.errors import UnreachableError
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot
from spes_p2p.testing.handle import imagined_snapshot


class FakeFeed:
    """Shows what it is given; `end` makes its node go away."""

    def __init__(self, *first: NodeSnapshot | LogEvent, name: str = "") -> None:
        self.name = name
        self.asked: list[str] = []
        self._first = first or (imagined_snapshot(),)
        self._queue: asyncio.Queue[NodeSnapshot | LogEvent | None] = asyncio.Queue()
        self._code: int | None = None
        self.reachable = asyncio.Event()
        """Cleared: who asks again for updates waits until it is set."""
        self.reachable.set()

    def show(self, update: NodeSnapshot | LogEvent) -> None:
        self._queue.put_nowait(update)

    def end(self, code: int | None) -> None:
        self._code = code
        self._queue.put_nowait(None)

    async def updates(self, after: int) -> AsyncIterator[NodeSnapshot | LogEvent]:
        await self.reachable.wait()
        for update in self._first:
            if isinstance(update, NodeSnapshot) or update.number > after:
                yield update
        while (update := await self._queue.get()) is not None:
            yield update
        raise UnreachableError("the node has gone")

    async def leave(self) -> None:
        self.asked.append("leave")

    def exit_code(self) -> int | None:
        return self._code


@pytest.fixture
def feed() -> FakeFeed:
    return FakeFeed()


def screen_text(app: App[str]) -> str:
    """What a person reads on the terminal, line by line."""
    # the compositor is the only part of Textual that has the whole screen as text
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


@pytest.fixture
def read_screen() -> object:
    return screen_text


@pytest.fixture
def make_feed() -> type[FakeFeed]:
    return FakeFeed
