"""How a node that knows only a run id gets the signed run manifest, and the held-out set, from the run's peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from spes_p2p.errors import BlobError, NotAdmittedError, RemoteProtocolError, TransportError, UnreachableError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.transport import P2PTransport
from spes_p2p.node.files import MANIFEST_FILE
from spes_p2p.protocol.codec import decode, decode_signed_run, encode, run_id
from spes_p2p.protocol.messages import RunManifest, SignedRun, TipAsk
from spes_p2p.storage.atomic import write_file

FIND_TIMEOUT_S = 180.0
_ASK_EVERY_S = 2.0


class ManifestSeeker:
    """Asks peers for the manifest of one run until one of them has it."""

    def __init__(self, run: RunId, transport: P2PTransport) -> None:
        self._run = run
        self._transport = transport
        self._found: asyncio.Future[SignedRun] = asyncio.get_running_loop().create_future()
        self.peers: tuple[PeerId, ...] = ()

    async def receive(self, sender: PeerId, data: bytes) -> None:
        """Handler of messages while there is no machine yet: only the manifest counts."""
        message = decode(data, sender)
        if isinstance(message, SignedRun) and not self._found.done():
            signed = decode_signed_run(data, sender)
            if run_id(signed.manifest) != self._run:
                raise RemoteProtocolError(sender, "the manifest of another run")
            self._found.set_result(signed)

    async def seek(self, notify: Callable[[str, str], None], timeout_s: float = FIND_TIMEOUT_S) -> SignedRun:
        """The manifest. Raises UnreachableError, with what was tried, after the time."""
        ask = encode(TipAsk(0, 0))
        try:
            async with asyncio.timeout(timeout_s):
                while not self._found.done():
                    hints = await self._transport.discovery.find(self._run)
                    peers = tuple(hint.peer for hint in hints if hint.peer != self._transport.peer_id)
                    if len(peers) != len(self.peers):
                        notify("info", f"found {len(peers)} peers of the run")
                    self.peers = peers
                    await asyncio.gather(*(self._ask(peer, ask) for peer in peers))
                    await asyncio.wait([self._found], timeout=_ASK_EVERY_S)
        except TimeoutError as error:
            what = f"none of its {len(self.peers)} peers answered" if self.peers else "no peer of it is known here"
            raise UnreachableError(
                f"the run was not found within {timeout_s:.0f} s: {what}\n"
                "Check the link with whoever gave it, and that a member of the run is online."
            ) from error
        return self._found.result()

    async def _ask(self, peer: PeerId, ask: bytes) -> None:
        try:
            await self._transport.send(peer, ask)
        except TransportError:
            return  # asked again in a moment


def save_manifest(data_dir: Path, signed: SignedRun) -> None:
    """Keep the manifest, so that the next start needs nobody for it."""
    write_file(data_dir / MANIFEST_FILE, encode(signed))


async def bring_held_out(manifest: RunManifest, transport: P2PTransport, peers: tuple[PeerId, ...]) -> None:
    """Fetch the held-out set, without which no text may be trained on. Raises UnreachableError."""
    sources = tuple(peer for peer in dict.fromkeys((*peers, *manifest.founders)) if peer != transport.peer_id)
    deadline = asyncio.get_running_loop().time() + FIND_TIMEOUT_S
    while True:
        try:
            await transport.fetch(manifest.held_out, sources, manifest.held_out_bytes)
        except BlobError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise UnreachableError(f"no peer has the run's held-out set\n{error}") from error
            await asyncio.sleep(_ASK_EVERY_S)
        else:
            return


def check_admission(manifest: RunManifest, admission: str, peer: PeerId, invite_seed: bytes | None) -> None:
    """Raises NotAdmittedError if the run cannot let this peer in, with what to ask for."""
    if peer in manifest.founders or admission == "open":
        return
    if admission == "invited" and invite_seed is None:
        raise NotAdmittedError(
            "this run admits by invitation, and the link has no invite key\nAsk whoever gave it for the whole link."
        )
    if admission == "allowlist":
        raise NotAdmittedError(
            "this run admits only peers on its allowlist\nAsk a founder to sign this node's peer id."
        )
