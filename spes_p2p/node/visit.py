"""A look at a run from outside, before joining it: its manifest, its newest certificates, and how fast its rounds are.

A visitor has an identity of its own for the time of the visit, is not announced, and leaves nothing on disk. What it
sees is verified as a joiner verifies it: the manifest by the run id of the link, certificates by the chain or the skip
rule, the ones before the newest by their hashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.errors import RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.network.addresses import is_loopback
from spes_p2p.network.link import InviteLink
from spes_p2p.network.transport import NetworkOptions, P2PTransport
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, LEDGER_FILE
from spes_p2p.node.joining import ManifestSeeker
from spes_p2p.node.resume import Resumption
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.body import Body, base_of
from spes_p2p.protocol.codec import body_hash, decode_certificate, encode
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.questions import CertificatesQuestion, Tip, TipQuestion, decode_answer
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.ledger import Ledger

LAST_CERTIFICATES = 16
"""So many of the newest ones are looked at."""
REACH_TIMEOUT_S = 20.0
FIND_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.5
_NUM_WATCHED = 5
_ANY_PORT, _LOCAL_PORT = "/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/0"

Notify = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a visitor has seen of a run."""

    signed: SignedRun
    config: RunConfig
    head: Head
    """After the newest final certificate; of genesis if there is none."""
    bodies: tuple[Body, ...]
    """Of the newest certificates, oldest first, at most LAST_CERTIFICATES."""
    peers: tuple[PeerId, ...]
    """That were found."""


@contextlib.asynccontextmanager
async def visiting(
    link: InviteLink, listen: tuple[str, ...] = (), announce: tuple[str, ...] = ()
) -> AsyncIterator[P2PTransport]:
    """A visitor's place on the network, with an identity and a folder for the time of the visit. `listen`: any free
    port unless given.

    Raises UnreachableError if no address of the link answers, MachineError if the daemon does not start.
    """
    local = bool(link.bootstrap) and all(is_loopback(address) for address in link.bootstrap)
    with tempfile.TemporaryDirectory(prefix="spes-p2p-visit-") as name:
        folder = Path(name)
        identity: Identity = load_or_create_identity(folder / IDENTITY_FILE)
        transport = await P2PTransport.create(
            identity,
            DiskBlobs(folder / BLOBS_FOLDER),
            NetworkOptions(
                identity_path=folder / IDENTITY_FILE,
                listen=listen or (_LOCAL_PORT if local else _ANY_PORT,),
                announce=announce,
                initial_peers=link.bootstrap,
                run=link.run,
                is_visitor=True,
                reach_timeout_s=REACH_TIMEOUT_S,
            ),
        )
        try:
            yield transport
        finally:
            await transport.close()


async def look(link: InviteLink, transport: P2PTransport, notify: Notify) -> Look:
    """Get the manifest and follow the chain to its newest final certificate. Raises UnreachableError."""
    seeker = ManifestSeeker(link.run, transport)
    transport.set_message_handler(seeker.receive)
    signed = await seeker.seek(notify, FIND_TIMEOUT_S)
    config = RunConfig.from_json(signed.manifest.config)
    genesis = genesis_head(signed.manifest, piece_sizes(config))
    peers = tuple(peer for peer in dict.fromkeys((*seeker.peers, *signed.manifest.founders)))
    with tempfile.TemporaryDirectory(prefix="spes-p2p-visit-") as name:
        ledger = Ledger(Path(name) / LEDGER_FILE)
        verification = Verification(verify)
        try:
            place = Resumption(genesis, None, transport.peer_id)
            around = Surroundings(
                ledger=ledger,
                transport=transport,
                verification=verification,
                clock=MonotonicClock(),
                notify=notify,
                waiting=lambda text: None,
            )
            await CatchUp(place, around).run(peers)
            bodies = _from_ledger(ledger, place.head)
        finally:
            verification.close()
            ledger.close()
    if len(bodies) < min(LAST_CERTIFICATES, place.head.round):
        bodies = await _asked(place.head, peers, transport) or bodies
    return Look(signed=signed, config=config, head=place.head, bodies=bodies, peers=peers)


def _from_ledger(ledger: Ledger, head: Head) -> tuple[Body, ...]:
    first = RoundNumber(max(1, head.round - LAST_CERTIFICATES + 1))
    entries = ledger.range(first, RoundNumber(head.round))
    return linked_back(head, [decode_certificate(entry.certificate).body for entry in entries])


def linked_back(head: Head, bodies: Sequence[Body]) -> tuple[Body, ...]:
    """Those that lead to a head by their hashes without a gap, oldest first: whoever gave them is not believed."""
    found: list[Body] = []
    wanted = bytes(head.hash)
    for body in reversed(bodies):
        if body_hash(body) != wanted:
            break
        found.append(body)
        wanted = bytes(base_of(body))
    return tuple(reversed(found))


async def _asked(head: Head, peers: Sequence[PeerId], transport: P2PTransport) -> tuple[Body, ...]:
    """The newest certificates of a node that skipped to the newest one, from whoever has them."""
    first = max(1, head.round - LAST_CERTIFICATES + 1)
    question = encode(CertificatesQuestion(first, head.round - first + 1))
    for peer in dict.fromkeys((*peers, *head.state.members)):
        try:
            frames = await transport.ask(peer, question)
            found = linked_back(head, [decode_certificate(frame, peer).body for frame in frames])
        except (TransportError, RemoteProtocolError):
            continue  # another one may have them
        if found:
            return found
    return ()


async def watch_rounds(transport: P2PTransport, known: Look, watch_s: float, enough: int = 4) -> tuple[float, ...]:
    """Seconds that each round takes which begins and ends while the run is watched: certificates carry no time.

    Several peers are asked, each at its own pace, since some may be gone or slow. Ends after `watch_s`, or as soon as
    there are `enough`.
    """
    now_s = asyncio.get_running_loop().time
    newest, since_s = known.head.round, None  # type: int, float | None
    durations: list[float] = []
    done = asyncio.Event()

    def note(number: int) -> None:
        nonlocal newest, since_s
        if number <= newest:
            return
        if since_s is not None:
            durations.extend([(now_s() - since_s) / (number - newest)] * (number - newest))
        newest, since_s = number, now_s()
        if len(durations) >= enough:
            done.set()

    async def watch(peer: PeerId) -> None:
        while True:
            note(await _round_of(transport, peer))
            await asyncio.sleep(_LOOK_EVERY_S)

    # those that discovery has found come first: they were online a moment ago
    watched = tuple(dict.fromkeys((*known.peers, *known.head.state.members)))[:_NUM_WATCHED]
    tasks = [asyncio.create_task(watch(peer)) for peer in watched]
    try:
        async with asyncio.timeout(watch_s):
            await done.wait()
    except TimeoutError:
        pass  # what was seen by now counts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tuple(durations)


async def _round_of(transport: P2PTransport, peer: PeerId) -> int:
    """Round of the newest final certificate that a peer says it has; 0 if it does not answer."""
    try:
        frames = await transport.ask(peer, encode(TipQuestion()))
        answer = decode_answer(frames[0], peer) if frames else None
    except (TransportError, RemoteProtocolError):
        return 0
    return answer.round if isinstance(answer, Tip) else 0
