"""What systemd wants to hear of a service: ready, alive, stopping (sd_notify(3)), as datagrams to its socket.

Without the variables that systemd sets (`NOTIFY_SOCKET`, `WATCHDOG_USEC`) nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping

WATCHDOG_SHARE = 3
"""So many signs of life within systemd's limit."""

logger = logging.getLogger(__name__)


class Notifier:
    """Sends states to systemd."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # an abstract socket is written with @ and begins with a zero byte
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(environment)
        """Longest time between two signs of life; None: systemd does not watch."""

    def tell(self, state: str) -> None:
        """One state, such as `READY=1`; what cannot be sent is logged: the service itself is well."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("systemd was not told %s: %s", state, error)

    async def keep_alive(self) -> None:
        """Signs of life, for ever. They come from the event loop: one that hangs falls silent."""
        if self.watchdog_s is None:
            return
        while True:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / WATCHDOG_SHARE)


@contextlib.asynccontextmanager
async def notifying(environment: Mapping[str, str] | None = None) -> AsyncIterator[Notifier]:
    """Tell systemd that the service is ready, that it lives while the context is open, and that it stops."""
    notifier = Notifier(os.environ if environment is None else environment)
    notifier.tell("READY=1")
    living = asyncio.create_task(notifier.keep_alive(), name="systemd watchdog")
    try:
        yield notifier
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        notifier.tell("STOPPING=1")


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """The limit that systemd set for this process; None for another one's, or none."""
    text, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(text) / 1e6
