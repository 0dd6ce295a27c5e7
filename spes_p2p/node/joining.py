"""How a node that knows only a run id gets the signed run manifest, and the held-out set, from the run's peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.crypto import KEY_BYTES, Identity, peer_text, verify
from spes_p2p.errors import (
    BlobError,
    IdentityError,
    NotAdmittedError,
    RemoteProtocolError,
    TransportError,
    UnreachableError,
)
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.discovery import Discovery
from spes_p2p.network.hints import PeerHint
from spes_p2p.node.driver import MessageTransport
from spes_p2p.node.files import MANIFEST_FILE
from spes_p2p.protocol.codec import decode, decode_signed_run, encode, run_id
from spes_p2p.protocol.messages import RunManifest, SignedRun, TipAsk
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.storage.atomic import write_file

FIND_TIMEOUT_S = 180.0
_ASK_EVERY_S = 2.0
_ANSWER_TIMEOUT_S = 15.0


class JoiningTransport(MessageTransport, Protocol):
    """What joining needs of the transport."""

    discovery: Discovery

    @property
    def refusals(self) -> Mapping[PeerId, str]:
        """Peers that this node cannot work with, and why."""
        ...


async def find_peers(
    discovery: Discovery, run: RunId, me: PeerId, notify: Callable[[str, str], None]
) -> tuple[PeerHint, ...]:
    """Hints of other peers of the run; none, with a warning, if the look-up fails."""
    try:
        hints = await discovery.find(run)
    except (OSError, EOFError, TimeoutError) as error:
        notify("warning", f"peers could not be looked up: {error!r}")
        return ()
    return tuple(hint for hint in hints if hint.peer != me)


class ManifestSeeker:
    """Asks peers for the manifest of one run until one of them has it."""

    def __init__(
        self,
        run: RunId,
        transport: JoiningTransport,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        entries: tuple[PeerId, ...] = (),
    ) -> None:
        """`sleep` waits so many seconds; `entries`: bootstrap nodes, which may have the manifest in their cache."""
        self._entries = entries
        self._run = run
        self._sleep = sleep
        self._transport = transport
        self._found: asyncio.Future[SignedRun] = asyncio.get_running_loop().create_future()
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._reasons: dict[PeerId, str] = {}
        self._identity_reports: dict[PeerId, IdentityError] = {}
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
        """The manifest. Raises UnreachableError, with what was tried, after the time; IdentityError if all peers say
        that they talk with another process of this identity."""
        looking = asyncio.create_task(self._look(notify))
        giving_up = asyncio.create_task(self._sleep(timeout_s))
        try:
            ends: list[asyncio.Future[Any]] = [self._found, looking, giving_up]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
            if not self._found.done():
                raise self._unreachable(timeout_s)
            return self._found.result()
        finally:
            tasks = (looking, giving_up, *self._asking.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, notify: Callable[[str, str], None]) -> None:
        """Find peers and ask them, again and again."""
        ask = encode(TipAsk(0, 0))
        while True:
            hints = await find_peers(self._transport.discovery, self._run, self._transport.peer_id, notify)
            peers = tuple(hint.peer for hint in hints)
            if len(peers) != len(self.peers):
                notify("info", f"found {len(peers)} peers of the run")
            self.peers = peers
            for peer in dict.fromkeys((*peers, *self._entries)):
                asking = self._asking.get(peer)
                if asking is None or asking.done():
                    self._asking[peer] = asyncio.create_task(self._ask(peer, ask))
            await self._sleep(_ASK_EVERY_S)
            if peers and self._identity_reports.keys() >= set(peers):
                raise self._identity_reports[peers[0]]

    async def _ask(self, peer: PeerId, ask: bytes) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._transport.send(peer, ask)
            self._identity_reports.pop(peer, None)
            self._reasons[peer] = "it has not given the manifest"
        except TransportError as error:
            self._reasons[peer] = str(error)
        except IdentityError as error:
            self._identity_reports[peer] = error
            self._reasons[peer] = str(error).splitlines()[0]
        except TimeoutError:
            self._reasons[peer] = f"no answer within {_ANSWER_TIMEOUT_S:.0f} s"

    def _unreachable(self, timeout_s: float) -> UnreachableError:
        asked = {peer: self._reasons.get(peer, "not asked yet") for peer in self.peers}
        reasons = asked | dict(self._transport.refusals)
        if reasons:
            what = f"none of its {len(reasons)} peers gave the run's manifest:"
            lines = [f"  {peer_text(peer)}: {reasons[peer]}" for peer in sorted(reasons)]
        else:
            what, lines = "no peer of it is known here", []
        return UnreachableError(
            "\n".join(
                (
                    f"the run was not found within {timeout_s:.0f} s: {what}",
                    *lines,
                    "Check the link with whoever gave it, and that a member of the run is online.",
                )
            )
        )


def save_manifest(data_dir: Path, signed: SignedRun) -> None:
    """Keep the manifest, so that the next start needs nobody for it."""
    write_file(data_dir / MANIFEST_FILE, encode(signed))


async def bring_held_out(
    manifest: RunManifest,
    transport: JoiningTransport,
    peers: tuple[PeerId, ...],
    entries: tuple[PeerId, ...] = (),
    timeout_s: float = FIND_TIMEOUT_S,
) -> None:
    """Fetch the held-out set, without which no text may be trained on: from peers of the run, else from `entries`,
    bootstrap nodes that may mirror it. Raises UnreachableError."""
    sources = tuple(peer for peer in dict.fromkeys((*peers, *manifest.founders)) if peer != transport.peer_id)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            try:
                await transport.fetch(manifest.held_out, sources, manifest.held_out_bytes)
            except BlobError:
                if not entries:
                    raise
                await transport.fetch(manifest.held_out, entries, manifest.held_out_bytes)
        except BlobError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise UnreachableError(f"no peer has the run's held-out set\n{error}") from error
            await asyncio.sleep(_ASK_EVERY_S)
        else:
            return


def _check_permit(manifest: RunManifest, peer: PeerId, permit: bytes | None) -> None:
    """A permit is the key of a founder and its signature over the peer's id."""
    ask = f"Ask a founder for a link of your own: `spes-p2p run admit {peer_text(peer)}`."
    if permit is None:
        raise NotAdmittedError(f"this run admits only peers that a founder has signed for\n{ask}")
    sponsor = PeerId(permit[:KEY_BYTES])
    payload = invite_payload(run_id(manifest), peer)
    if sponsor not in manifest.founders or not verify(sponsor, "allow", payload, permit[KEY_BYTES:]):
        raise NotAdmittedError(f"the link was made for another peer or another run\n{ask}")


def check_admission(
    manifest: RunManifest, admission: str, peer: PeerId, invite_seed: bytes | None, permit: bytes | None
) -> None:
    """Raises NotAdmittedError if the run cannot let this peer in, with what to ask for."""
    if peer in manifest.founders or admission == "open":
        return
    if admission == "allowlist":
        _check_permit(manifest, peer, permit)
        return
    if invite_seed is None:
        raise NotAdmittedError(
            "this run admits by invitation, and the link has no invite key\nAsk whoever gave it for the whole link."
        )
    if Identity.from_seed(invite_seed).peer_id != manifest.invite_key:
        raise NotAdmittedError(
            "the invite key in the link is not that of this run\nAsk whoever gave it for a new link."
        )
