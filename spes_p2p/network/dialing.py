"""Who can be reached where, and streams to them.

Addresses come from the operator, from hints in the DHT and from the peers' own hellos. All of them are only tried:
libp2p makes sure that whoever answers holds the peer's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from spes_p2p.crypto import peer_text
from spes_p2p.errors import AddressError, TransportError
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import parse_peer_address
from spes_p2p.network.channel import Stream
from spes_p2p.network.hints import MAX_ADDRESSES
from spes_p2p.network.p2p import Daemon
from spes_p2p.network.probe import check_listening

DIAL_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 20.0
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
_MAX_PEERS = 8192


class Dialer:
    """Opens streams; remembers addresses, and for how long not to try again a peer that did not answer."""

    def __init__(self, daemon: Daemon, look_up: Callable[[PeerId], Awaitable[None]]) -> None:
        """`look_up` asks the DHT for a peer's addresses and passes them to `learn`."""
        self._daemon = daemon
        self._look_up = look_up
        self._routes: dict[PeerId, tuple[str, ...]] = {}
        self._met: set[PeerId] = set()
        self._pauses: dict[PeerId, tuple[float, float, str]] = {}
        """Peer -> (no new try before, length of this pause in s, reason)."""
        self._locks: dict[PeerId, asyncio.Lock] = {}

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember addresses that somebody gave for a peer; those that are not the peer's or malformed are left out.

        The latest come first; the older ones are kept as far as there is room.
        """
        routes = []
        for text in addresses:
            try:
                address = parse_peer_address(text)
            except AddressError:
                continue  # from the network: a hint of no use
            if address.peer == peer:
                routes.append(address.route)
        if peer not in self._routes and len(self._routes) >= _MAX_PEERS:
            del self._routes[next(iter(self._routes))]
        known = self._routes.get(peer, ())
        self._routes[peer] = tuple(dict.fromkeys((*routes, *known)))[:MAX_ADDRESSES]

    def retry_now(self, peer: PeerId) -> None:
        """Forget that a peer did not answer."""
        self._pauses.pop(peer, None)

    async def open(self, peer: PeerId, name: str) -> Stream:
        """A fresh stream of protocol `name`. Raises TransportError; at once if the peer did not answer just before."""
        async with self._locks.setdefault(peer, asyncio.Lock()):
            if peer in self._met:
                try:
                    return await self._daemon.open_stream(peer, name, DIAL_TIMEOUT_S)
                except TransportError:
                    self._met.discard(peer)
            self._check_pause(peer)
            try:
                await self._connect(peer)
                stream = await self._daemon.open_stream(peer, name, DIAL_TIMEOUT_S)
            except TransportError as error:
                self._pause(peer, str(error))
                raise
        self._met.add(peer)
        self._pauses.pop(peer, None)
        return stream

    async def _connect(self, peer: PeerId) -> None:
        routes = self._routes.get(peer, ())
        try:
            if routes:
                await self._dial(peer, routes)
                return
        except TransportError:
            await self._look_up(peer)
            if self._routes.get(peer, ()) == routes:
                raise
        else:
            await self._look_up(peer)
        await self._dial(peer, self._routes.get(peer, ()))

    async def _dial(self, peer: PeerId, routes: tuple[str, ...]) -> None:
        if routes:
            try:
                await check_listening(routes, PROBE_TIMEOUT_S)
            except TransportError as error:
                raise TransportError(f"cannot reach {peer_text(peer)}: {error}") from error
        await self._daemon.dial(peer, routes, DIAL_TIMEOUT_S)

    def _check_pause(self, peer: PeerId) -> None:
        until_s, _, reason = self._pauses.get(peer, (0.0, 0.0, ""))
        if asyncio.get_running_loop().time() < until_s:
            raise TransportError(reason)

    def _pause(self, peer: PeerId, reason: str) -> None:
        _, last_s, _ = self._pauses.get(peer, (0.0, MIN_PAUSE_S / 2, ""))
        pause_s = min(2 * last_s, MAX_PAUSE_S)
        self._pauses[peer] = (asyncio.get_running_loop().time() + pause_s, pause_s, reason)
