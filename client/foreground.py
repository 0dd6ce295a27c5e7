"""Runs a node in this process until it is done: local API, progress lines, and what Ctrl-C means.

Ctrl-C once: leave properly, saying what remains. Twice, or SIGTERM: end now. Before the node has begun to join, the
first Ctrl-C ends it, since there is nothing to leave.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog

from spes_p2p import systemd
from spes_p2p.client import folders
from spes_p2p.client.output import complain
from spes_p2p.client.progress import Progress
from spes_p2p.config import NodeConfig
from spes_p2p.errors import EXIT_INTERRUPTED
from spes_p2p.network.link import InviteLink, format_link
from spes_p2p.node.control import NodeHandle, serve_control


@dataclass(slots=True)
class Interrupts:
    """What was asked of the node from outside."""

    running: asyncio.Task[int]
    handle: NodeHandle | None = None
    asked: list[str] = field(default_factory=list)

    def leave_or_stop(self) -> None:
        """Ctrl-C."""
        if self.handle is None or self.asked:
            self.stop(keep_wish=False)
            return
        self.asked.append("leave")
        complain("leaving properly; press Ctrl-C again to end now")
        self.handle.request_leave()

    def stop(self, *, keep_wish: bool = True) -> None:
        """SIGTERM (a parent that ended sends it too) or the end of the terminal: a leave that was asked for is
        completed at the next start. `keep_wish` False: a second Ctrl-C, which takes it back."""
        self.asked.append("stop")
        if self.handle is None:
            self.running.cancel()
        else:
            self.handle.request_stop(keep_wish=keep_wish)


def run_in_foreground(config: NodeConfig, link: InviteLink, log: structlog.typing.FilteringBoundLogger) -> int:
    """Run the node and return the exit code of the command. Raises what the node raises: SpesError."""
    return asyncio.run(_run(config, link, log))


async def _run(config: NodeConfig, link: InviteLink, log: structlog.typing.FilteringBoundLogger) -> int:
    # hivemind and what it imports take seconds; everything that can be wrong with the arguments was checked before
    from spes_p2p.node.node import run_node

    progress = Progress(log)
    log.info("starting: looking for somebody who knows the run")
    async with AsyncExitStack() as stack:

        async def on_ready(handle: NodeHandle) -> None:
            interrupts.handle = handle
            # not before: a port in use, or a run that nobody answers for, is not worth remembering
            folders.remember(config.data_dir, format_link(link))
            await stack.enter_async_context(serve_control(handle, config.data_dir))
            await stack.enter_async_context(systemd.notifying())
            following = asyncio.create_task(progress.follow(handle), name="progress lines")
            stack.callback(following.cancel)

        running = asyncio.create_task(run_node(config, link, on_ready=on_ready), name="node")
        interrupts = Interrupts(running)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupts.leave_or_stop)
        loop.add_signal_handler(signal.SIGTERM, interrupts.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: it shall outlive its terminal
            loop.add_signal_handler(signal.SIGHUP, interrupts.stop)
        try:
            exit_code = await running
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED
        if interrupts.handle is not None:
            progress.tell_events(interrupts.handle)
    if exit_code == 0:
        log.info("left the run")
    return exit_code
