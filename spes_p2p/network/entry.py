"""Contact with the peers that were named at the start: bootstrap nodes, or any member.

Each is dialled at once and again and again with growing pauses, so that one that is up late, or comes back, is picked
up. An open channel to it serves three ends: it tells us of another process with our identity, it measures how far the
clocks are apart, and its end is noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from spes_p2p.crypto import peer_text
from spes_p2p.errors import IdentityError, TransportError, UnreachableError
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import PeerAddress
from spes_p2p.network.channel import Channel, UnfitPeerError

MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_SKEW_MS = 3000

logger = logging.getLogger(__name__)


class Entrances:
    """Keeps in contact with `addresses`."""

    def __init__(
        self,
        addresses: Sequence[PeerAddress],
        connect: Callable[[PeerId], Awaitable[Channel]],
        enter: Callable[[PeerId], Awaitable[None]],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`connect` opens a channel, without pause after failures; `enter` makes the DHT known to a peer just met."""
        self._connect = connect
        self._enter = enter
        self._fail = fail
        self._addresses = tuple(addresses)
        self._reasons: dict[PeerId, str] = {}
        self._skews_ms: dict[PeerId, int] = {}
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peers = dict.fromkeys(address.peer for address in addresses)
        self._unfit: set[PeerId] = set()
        self._tasks = {peer: asyncio.create_task(self._keep_in_contact(peer)) for peer in peers}
        for task in self._tasks.values():
            task.add_done_callback(self._ended)

    @property
    def skews_ms(self) -> dict[PeerId, int]:
        """How far the clocks of the peers met are ahead of ours."""
        return dict(self._skews_ms)

    async def wait_first(self, timeout_s: float) -> None:
        """Return once one peer is in contact; at once if none was named.

        Raises UnreachableError with a reason for each address if none answers within `timeout_s`, or at once if all
        say that they do not fit; IdentityError if a process with our identity is connected already.
        """
        if not self._tasks:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._first), timeout_s)
        except TimeoutError as error:
            raise self._unreachable(f"answered within {timeout_s:.0f} s") from error

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._first.done() and not self._first.cancelled():
            self._first.exception()  # nobody may have waited for it
        self._first.cancel()

    async def _keep_in_contact(self, peer: PeerId) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            try:
                channel = await self._connect(peer)
            except TransportError as error:
                self._note_reason(peer, str(error))
                if isinstance(error, UnfitPeerError):
                    self._note_unfit(peer)
            except IdentityError as error:
                self._give_up(error)
                return
            else:
                pause_s = MIN_PAUSE_S
                self._reasons.pop(peer, None)
                self._note_skew(channel)
                await self._enter(peer)
                if not self._first.done():
                    self._first.set_result(None)
                await channel.wait_closed()
                logger.info("contact with %s was lost", peer_text(peer))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _unreachable(self, did: str) -> UnreachableError:
        reasons = [f"  {address.text}: {self._reasons.get(address.peer, 'no answer')}" for address in self._addresses]
        return UnreachableError("\n".join((f"none of the bootstrap addresses {did}:", *reasons)))

    def _note_reason(self, peer: PeerId, reason: str) -> None:
        """Keep, and log once, why a peer is not in contact; libp2p's "dial backoff" does not replace a real reason."""
        known = self._reasons.get(peer)
        if known is None or (reason != known and "dial backoff" not in reason):
            logger.warning("%s; trying again", reason)
            self._reasons[peer] = reason

    def _note_unfit(self, peer: PeerId) -> None:
        self._unfit.add(peer)
        if self._unfit == self._tasks.keys() and not self._first.done():
            self._first.set_exception(self._unreachable("fits this node"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._fail(bug)

    def _give_up(self, error: IdentityError) -> None:
        if not self._first.done():
            self._first.set_exception(error)
        self._fail(error)

    def _note_skew(self, channel: Channel) -> None:
        self._skews_ms[channel.peer] = channel.skew_ms
        if abs(channel.skew_ms) > MAX_SKEW_MS:
            side = "behind" if channel.skew_ms > 0 else "ahead of"
            logger.warning(
                "this machine's clock is %.1f s %s that of %s: set it by NTP, or peers may not find this node",
                abs(channel.skew_ms) / 1000,
                side,
                peer_text(channel.peer),
            )
