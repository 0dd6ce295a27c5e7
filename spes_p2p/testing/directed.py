"""What directed scenarios share: a swarm up to a round, who leads it, and what its certificates say."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import ItemKind
from spes_p2p.testing.protocol_cases import quick_config
from spes_p2p.testing.swarm import Line, SimPeer, Swarm

MINUTE_MS = 60_000


def swarm_of(num_founders: int, *, seed: int = 1, line: Line | None = None, **protocol: object) -> Swarm:
    """A swarm of p0, p1, ... in which nobody has said anything yet."""
    swarm = Swarm(quick_config(**protocol), [f"p{number}" for number in range(num_founders)], seed=seed)
    for peer in swarm.peers.values():
        peer.line = line or Line()
    return swarm


def swarm_in_round(number: int, num_founders: int, **options: object) -> tuple[Swarm, list[SimPeer]]:
    """A healthy swarm in which that round has just opened, and its voters in the order in which they lead."""
    swarm = swarm_of(num_founders, **options)  # type: ignore[arg-type]  # passed on as they are
    if not swarm.run_to_round(number - 1, 10 * MINUTE_MS):
        raise TimeoutError(f"round {number - 1} did not end")
    terms = next(iter(swarm.peers.values())).machine.terms
    return swarm, [swarm.peers[peer] for peer in terms.leaders]


def updates_of(peer: SimPeer, number: int) -> set[PeerId]:
    """Authors of the updates in the certificate of a round, as a peer adopted it."""
    body = next(certificate.body for certificate in peer.certificates if certificate.body.round == number)
    members = head_after(peer, number - 1).state.members
    return {members[entry.who] for entry in body.entries if entry.kind is ItemKind.UPDATE}


def view_of(peer: SimPeer, number: int) -> int:
    """The view in which a round was decided."""
    return next(certificate.view for certificate in peer.certificates if certificate.body.round == number)


def head_after(peer: SimPeer, number: int) -> Head:
    """The head that a round ended with."""
    return next(head for head in peer.heads if head.round == number)


def hashes_of(peers: Iterable[SimPeer], number: int) -> set[Digest]:
    """Hashes of the certificates that these peers have of a round."""
    return {head_after(peer, number).hash for peer in peers}


def lost_blobs(head: Head, holders: Iterable[SimPeer]) -> set[Digest]:
    """Blobs that a certified state names and none of these peers has."""
    named = {*head.parts, *(share.blob for row in head.state.shards for share in row.blobs)}
    return named - {blob for peer in holders for blob in peer.blobs}
