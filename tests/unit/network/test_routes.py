"""How connections are named for people."""

from __future__ import annotations

import pytest

from spes_p2p.ids import PeerId
from spes_p2p.network.routes import kind_of, routes_of

ADA, BEN = PeerId(b"a" * 32), PeerId(b"b" * 32)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/ip4/10.0.0.1/tcp/4001", "tcp"),
        ("/ip6/::1/tcp/4001", "tcp"),
        ("/ip4/10.0.0.1/udp/4001/quic-v1", "quic"),
        ("/ip4/10.0.0.1/udp/4001/quic-v1/webtransport", "quic"),
        ("/dns4/entry.example/tcp/443/ws", "websocket"),
        ("/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWA/p2p-circuit", "relayed"),
        ("/unix/tmp/socket", ""),
    ],
)
def test_kind_follows_from_the_address(address: str, kind: str) -> None:
    assert kind_of(address) == kind


def test_direct_connection_counts_beside_a_relayed_one() -> None:
    relayed, direct = "/ip4/10.0.0.1/tcp/1/p2p/12D3KooWA/p2p-circuit", "/ip4/10.0.0.2/tcp/2"
    assert routes_of([(ADA, relayed), (ADA, direct), (BEN, relayed)]) == {ADA: "tcp", BEN: "relayed"}
    assert routes_of([(ADA, direct), (ADA, relayed)]) == {ADA: "tcp"}
