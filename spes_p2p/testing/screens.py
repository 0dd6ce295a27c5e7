"""The terminal UI in a terminal that is not there: feeds without a node, and what a person would read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from spes_p2p.errors import SpesError, UnreachableError
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot
from spes_p2p.testing.handle import imagined_snapshot

WAIT_S = 30.0


class FakeFeed:
    """Shows what it is given; `end` makes its node go away. Remembers in `asked` what was asked of the node."""

    def __init__(self, *first: NodeSnapshot | LogEvent, name: str = "") -> None:
        self.name = name
        self.asked: list[str] = []
        self._first = first or (imagined_snapshot(),)
        self._queue: asyncio.Queue[NodeSnapshot | LogEvent | None] = asyncio.Queue()
        self._code: int | None = None
        self.reachable = asyncio.Event()
        """Cleared: who asks again for updates waits until it is set."""
        self.reachable.set()
        self.answers = True
        """False: the node does not answer what is asked of it."""
        self.why_gone = "the node has gone"
        """What the UI hears when the stream breaks."""
        self.refusal: SpesError | None = None
        """How the node answers a change of its limits, if not by making it."""
        self.may_answer = asyncio.Event()
        """Cleared: the node takes its time over a change of its limits."""
        self.may_answer.set()

    def show(self, update: NodeSnapshot | LogEvent) -> None:
        """Tell the UI something."""
        self._queue.put_nowait(update)

    def end(self, code: int | None, *rest: NodeSnapshot | LogEvent) -> None:
        """The stream breaks; `rest` is what the next one begins with, if not the same as the first."""
        self._code = code
        self._first = rest or self._first
        self._queue.put_nowait(None)

    async def updates(self, after: int) -> AsyncIterator[NodeSnapshot | LogEvent]:
        """See `Feed`."""
        await self.reachable.wait()
        for update in self._first:
            if isinstance(update, NodeSnapshot) or update.number > after:
                yield update
        while (told := await self._queue.get()) is not None:
            yield told
        raise UnreachableError(self.why_gone)

    async def leave(self) -> None:
        """See `Feed`."""
        self._ask("leave")

    async def pause(self) -> None:
        """See `Feed`."""
        self._ask("pause")

    async def resume(self) -> None:
        """See `Feed`."""
        self._ask("resume")

    async def change_limits(self, changes: Mapping[str, str]) -> None:
        """See `Feed`; waits until `may_answer` is set, and raises `refusal` if there is one."""
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        self._ask(f"limits {dict(changes)}")

    def _ask(self, wish: str) -> None:
        if not self.answers:
            raise UnreachableError("the node does not answer")
        self.asked.append(wish)

    def exit_code(self) -> int | None:
        """See `Feed`."""
        return self._code

    def is_running(self) -> bool:
        """See `Feed`."""
        return self._code is None


def screen_text(app: App[Any]) -> str:
    """What a person reads on the terminal, line by line."""
    # the compositor is the only part of Textual that has the whole screen as text
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


def screen_colours(app: App[Any]) -> set[str]:
    """The colours that the terminal would be told, foreground and background; its own default is none of them."""
    found = set()
    for strip in app.screen._compositor.render_strips():
        for line_filter in app._filters:
            if line_filter.enabled:
                strip = strip.apply_filter(line_filter, app.screen.background_colors[1])
        for segment in strip:
            for colour in (segment.style.color, segment.style.bgcolor) if segment.style else ():
                if colour is not None and not colour.is_default:
                    found.add(colour.name)
    return found


async def settle(pilot: Pilot[Any], until: Callable[[], bool]) -> None:
    """Let the app work until something holds. Raises TimeoutError after half a minute."""
    async with asyncio.timeout(WAIT_S):
        while not until():
            await pilot.pause()


async def reads(pilot: Pilot[Any], *words: str) -> str:
    """The screen, once it has all these words: it is drawn some time after what it shows has changed.

    Raises AssertionError, with what is missing and the screen, after half a minute.
    """
    text = ""

    def has_them() -> bool:
        nonlocal text
        text = screen_text(pilot.app)
        return all(word in text for word in words)

    try:
        await settle(pilot, has_them)
    except TimeoutError:
        missing = [word for word in words if word not in text]
        raise AssertionError(f"not on the screen: {missing}\n{text}") from None
    return text
