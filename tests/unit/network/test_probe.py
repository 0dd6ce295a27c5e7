"""Whether somebody listens, before libp2p is asked to dial."""

from __future__ import annotations

import socket

import pytest

from spes_p2p.errors import TransportError
from spes_p2p.network.probe import check_listening


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_process_that_is_down_is_noticed_though_it_has_a_quic_address_too() -> None:
    port = closed_port()
    routes = (f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/127.0.0.1/udp/{port}/quic-v1")
    with pytest.raises(TransportError, match="refused"):
        await check_listening(routes, 30)


async def test_what_cannot_be_tried_by_tcp_is_left_to_libp2p() -> None:
    port = closed_port()
    tcp = f"/ip4/127.0.0.1/tcp/{port}"
    relay = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN/p2p-circuit"
    for other in (f"/ip4/127.0.0.1/udp/{port + 1}/quic-v1", f"/ip4/127.0.0.2/udp/{port}/quic-v1", relay):
        await check_listening((tcp, other), 30)


async def test_one_that_listens_is_enough() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        there = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        await check_listening((f"/ip4/127.0.0.1/tcp/{closed_port()}", there), 30)
