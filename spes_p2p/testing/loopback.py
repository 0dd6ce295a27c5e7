"""Real peers on loopback, in this process: each with its own libp2p daemon and its blobs on disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.crypto import Identity
from spes_p2p.network.transport import NetworkOptions, P2PTransport
from spes_p2p.storage.blobs import DiskBlobs

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackPeer:
    """A transport and what it stands on."""

    transport: P2PTransport
    blobs: DiskBlobs
    identity: Identity
    options: NetworkOptions


class LoopbackSwarm:
    """Starts peers; all that were started are closed at the end of `loopback_swarm`."""

    def __init__(self, folder: Path, undo: contextlib.AsyncExitStack) -> None:
        self._folder = folder
        self._undo = undo

    async def start(self, number: int, options: NetworkOptions | None = None) -> LoopbackPeer:
        """Start the peer whose key has the seed `number` repeated; its folder is kept over restarts.

        `options` without identity path and listen address, which are filled in here. Raises what
        `P2PTransport.create` raises.
        """
        identity = Identity.from_seed(bytes([number]) * 32)
        folder = self._folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "identity.key"
        path.write_bytes(identity.to_libp2p_bytes())
        blobs = DiskBlobs(folder / "blobs")
        options = replace(options or NetworkOptions(identity_path=path), identity_path=path)
        if options.listen == NetworkOptions(identity_path=path).listen:
            options = replace(options, listen=LISTEN)
        transport = await P2PTransport.create(identity, blobs, options)
        self._undo.push_async_callback(transport.close)
        return LoopbackPeer(transport=transport, blobs=blobs, identity=identity, options=options)


@contextlib.asynccontextmanager
async def loopback_swarm(folder: Path) -> AsyncIterator[LoopbackSwarm]:
    """Peers that keep their files below `folder`."""
    async with contextlib.AsyncExitStack() as undo:
        yield LoopbackSwarm(folder, undo)


async def until(condition: Callable[[], Awaitable[bool]], pause_s: float = 0.05) -> None:
    """Wait for a condition of the real world. Raises TimeoutError after a minute."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(pause_s)
