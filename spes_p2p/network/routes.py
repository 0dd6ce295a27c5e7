"""How each peer is connected: directly over which transport, or through a relay, as the daemon's connections say."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.ids import PeerId

RELAYED = "relayed"
_KINDS = (
    ("/p2p-circuit", RELAYED),
    ("/quic", "quic"),
    ("/ws", "websocket"),
    ("/webtransport", "quic"),
    ("/tcp/", "tcp"),
)
"""What an address contains -> what it is, the first that fits."""


def kind_of(address: str) -> str:
    """`tcp`, `quic`, `websocket` or `relayed` for a connection's remote multiaddress; empty if it is none of these."""
    return next((kind for mark, kind in _KINDS if mark in address), "")


def routes_of(connections: Iterable[tuple[PeerId, str]]) -> dict[PeerId, str]:
    """Kind of each peer's connection. Of several a direct one counts: libp2p prefers it for new streams."""
    found: dict[PeerId, str] = {}
    for peer, address in connections:
        kind = kind_of(address)
        if kind and found.get(peer, RELAYED) == RELAYED:
            found[peer] = kind
    return found
