"""Whether anybody listens at an address, found out before libp2p is asked to dial it.

After a failed dial libp2p refuses to try the same address again for 5 seconds and more. A peer that is being restarted,
or a bootstrap node that is up late, would be picked up that much later; and the reason it then gives, "dial backoff",
tells nobody anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from spes_p2p.errors import TransportError


async def check_listening(routes: Sequence[str], timeout_s: float) -> None:
    """Return if a TCP connection to one of `routes` succeeds, or if some cannot be tried in this way.

    Raises TransportError with the reason for each route if nobody listens at any of them.
    """
    endpoints = {_endpoint(route) for route in routes} - {None}
    if any(_endpoint(route) is None and _quic_endpoint(route) not in endpoints for route in routes):
        return
    tries = [asyncio.create_task(_try(*endpoint, timeout_s)) for endpoint in endpoints if endpoint is not None]
    try:
        reasons = []
        for next_done in asyncio.as_completed(tries):
            reason = await next_done
            if reason is None:
                return
            reasons.append(reason)
    finally:
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    raise TransportError("; ".join(sorted(reasons)))


def _endpoint(route: str) -> tuple[str, int] | None:
    """(host, port) of a plain TCP route; None for a relayed one, or another transport."""
    match route.split("/")[1:]:
        case [_, host, "tcp", port]:
            return host, int(port)
    return None


def _quic_endpoint(route: str) -> tuple[str, int] | None:
    """(host, port) of a QUIC route. Who listens there by TCP as well is judged by that: both are one process."""
    match route.split("/")[1:]:
        case [_, host, "udp", port, "quic-v1"]:
            return host, int(port)
    return None


async def _try(host: str, port: int, timeout_s: float) -> str | None:
    """None if somebody listens there, else the reason."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"{host} port {port}: no answer within {timeout_s:.0f} s"
    except OSError as error:
        return f"{host} port {port}: {os.strerror(error.errno) if error.errno else error}"
    writer.close()
    return None
