"""What the network says of this machine: ports, entry points, clocks, reachability, relays, and the run itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.client.doctor.finding import Finding, fail, of_error, ok, warn
from spes_p2p.client.output import count_text, short_peer
from spes_p2p.crypto import peer_text
from spes_p2p.errors import (
    IdentityError,
    LocalStateError,
    MachineError,
    NotAdmittedError,
    RemoteProtocolError,
    SpesError,
    TransportError,
    UnreachableError,
)
from spes_p2p.ids import PeerId
from spes_p2p.network.addresses import is_loopback, parse_peer_address
from spes_p2p.network.link import InviteLink
from spes_p2p.network.ports import check_ports_free
from spes_p2p.node.files import IDENTITY_FILE
from spes_p2p.storage.identity import load_identity

if TYPE_CHECKING:
    from spes_p2p.network.transport import P2PTransport

ALL_ANSWER_S = 10.0
"""For the other entry points once one has answered."""
LOOK_EVERY_S = 0.1
NOTED_SKEW_MS, MOST_SKEW_MS = 1000, 3000
"""Peers whose clocks differ by more than 3 s may not find each other in the DHT."""
GIVE_LINK = "Give the invite link: `spes-p2p doctor LINK`."
FORWARD = "Forward a TCP port in the router, and join with --listen and --announce for it."
NTP = "Set this machine's clock by NTP, such as with `timedatectl set-ntp true`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the node of this machine is, or would be."""

    folder: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    is_running: bool
    """Whether the folder's node runs, so that a port in use is probably its own."""


def ports(place: Place) -> Finding:
    """Whether somebody else holds the ports to listen on."""
    try:
        check_ports_free(place.listen)
        if not place.listen:
            with socket.socket() as probe:
                probe.bind(("", 0))
    except MachineError as error:
        if place.is_running:
            return ok("port", f"{str(error).splitlines()[0].partition(':')[0]}, by the node that runs here, it seems")
        first, _, remedy = str(error).partition(": ")
        return fail("port", first, f"{remedy or 'listen on another address'} (--listen).")
    except OSError as error:
        return fail("port", f"no port can be listened on: {error.strerror}", "Allow it in the system's settings.")
    shown = ", ".join(place.listen) or "any free port"
    return ok("port", f"{shown} can be listened on")


def without_link() -> Iterator[Finding]:
    """What is not known without a link."""
    yield warn("clock", "compared with nobody: there is no link", GIVE_LINK)
    yield warn("reach", "not tried: there is no link", GIVE_LINK)


async def with_link(link: InviteLink, place: Place) -> list[Finding]:
    """Get in contact with the entry points of a link, and see what they say."""
    # hivemind takes seconds to load
    from spes_p2p.node.visit import visiting

    found: list[Finding] = []
    listen = () if place.is_running else place.listen
    try:
        async with visiting(link, listen, place.announce) as transport:
            named = list(dict.fromkeys(parse_peer_address(text).peer for text in link.bootstrap))
            await _all_answer(transport, named)
            met = [peer for peer in named if peer in transport.skews_ms]
            found.append(_entry(named, met))
            found.append(_clock([transport.skews_ms[peer] for peer in met]))
            found += [await _reach(transport, met), await _relay(transport, met)]
            found += await _run(link, place, transport)
    except UnreachableError as error:
        fact = " ".join(line.strip() for line in str(error).splitlines())
        found.append(fail("entry", fact, "Ask for a newer link, or check this machine's line and firewall."))
        found += [
            warn("clock", "compared with nobody: nobody answers", "See `entry`."),
            warn("reach", "not tried: nobody answers", "See `entry`."),
        ]
    except (MachineError, TransportError, IdentityError) as error:
        found.append(of_error("entry", error))
    return found


async def _all_answer(transport: P2PTransport, named: list[PeerId]) -> None:
    """Return once all entry points are in contact, or after a while."""
    until_s = asyncio.get_running_loop().time() + ALL_ANSWER_S
    while set(named) - transport.skews_ms.keys() and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(LOOK_EVERY_S)


def _entry(named: list[PeerId], met: list[PeerId]) -> Finding:
    missing = [short_peer(peer_text(peer)) for peer in named if peer not in met]
    fact = f"{len(met)} of {count_text(len(named), 'entry point')} answer"
    if missing:
        return warn(
            "entry", f"{fact}, not {', '.join(missing)}", "The run can be joined; ask the operator about these."
        )
    return ok("entry", fact)


def _clock(skews_ms: list[int]) -> Finding:
    """Against the wall clocks that authenticated peers state at hello; the median, since one of them may be wrong."""
    if not skews_ms:
        return warn("clock", "compared with nobody: nobody answers", "See `entry`.")
    skew_ms = sorted(skews_ms)[len(skews_ms) // 2]
    side = "behind" if skew_ms > 0 else "ahead of"
    fact = f"{abs(skew_ms) / 1000:.1f} s {side} {count_text(len(skews_ms), 'peer')} (median, by what they say at hello)"
    if abs(skew_ms) > MOST_SKEW_MS:
        return fail("clock", fact, NTP)
    return warn("clock", fact, NTP) if abs(skew_ms) > NOTED_SKEW_MS else ok("clock", fact)


async def _reach(transport: P2PTransport, met: list[PeerId]) -> Finding:
    """Whether others can dial this machine: an entry point is asked to try."""
    from spes_p2p.network.dial_back import dial_back

    addresses = await transport.addresses()
    if all(is_loopback(address) for address in addresses):
        return ok("reach", "this machine's own addresses alone: nothing beyond it is asked for")
    said: list[str] = []
    for peer in met:
        name = short_peer(peer_text(peer))
        try:
            answer = await dial_back(transport.daemon, peer)
        except TransportError as error:
            said.append(f"{name}: {error}")
            continue
        if answer.verdict == "reached":
            return ok("reach", f"direct: {name} dialled back to {answer.detail}")
        said.append(
            f"{name} {'could not dial back' if answer.verdict == 'not reached' else 'did not try'}: {answer.detail}"
        )
    relayed = [address for address in addresses if "/p2p-circuit" in address]
    if relayed:
        fact = f"relayed, through {relayed[0].partition('/p2p-circuit')[0]}"
        return warn("reach", fact, f"It works, slower. {FORWARD}")
    return warn("reach", f"not shown to be direct ({'; '.join(said) or 'nobody was asked'})", FORWARD)


async def _relay(transport: P2PTransport, met: list[PeerId]) -> Finding:
    from spes_p2p.network.dial_back import offers_relay

    relays = [peer for peer in met if await offers_relay(transport.daemon, peer)]
    if relays:
        return ok("relay", f"{len(relays)} of {count_text(len(met), 'entry point')} relay for peers behind routers")
    return warn("relay", "no entry point relays", "Fine if this machine can be reached directly; else ask for another.")


async def _run(link: InviteLink, place: Place, transport: P2PTransport) -> list[Finding]:
    """Whether members of the run answer, and whether they would let this machine in."""
    from spes_p2p.node.joining import check_admission
    from spes_p2p.node.visit import look

    try:
        seen = await look(link, transport, lambda level, text: None)
    except (SpesError, RemoteProtocolError) as error:
        return [of_error("members", error)]
    members = count_text(len(seen.head.state.members), "member")
    found = [ok("members", f"run {seen.config.name}: {members}, certified up to round {seen.head.round:,}")]
    try:
        me = load_identity(place.folder / IDENTITY_FILE).peer_id
    except LocalStateError:
        me = transport.peer_id  # there is none yet: a stranger's stands for it
    try:
        check_admission(seen.signed.manifest, seen.config.protocol.admission, me, link.invite_seed, link.permit)
    except NotAdmittedError as error:
        return [*found, of_error("admission", error)]
    return [*found, ok("admission", f"{seen.config.protocol.admission}: this link lets this machine in")]
