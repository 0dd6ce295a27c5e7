from __future__ import annotations

import pytest

from spes_p2p.crypto import Identity
from spes_p2p.errors import AddressError
from spes_p2p.network.addresses import (
    EXAMPLE,
    EXAMPLE_PEER,
    is_loopback,
    parse_announce_address,
    parse_listen_address,
    parse_peer_address,
    socket_address,
    with_port,
)

PEER = Identity.from_seed(bytes(32))


@pytest.mark.parametrize(
    "route",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/tcp/31337",
        "/dns4/node.example.org/tcp/443",
        "/dns/node.example.org/udp/4001/quic-v1",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity.from_seed(bytes([1]) * 32).text}/p2p-circuit",
    ],
)
def test_a_good_address_is_taken_apart(route: str) -> None:
    address = parse_peer_address(f"{route}/p2p/{PEER.text}")
    assert (address.route, address.peer, address.text) == (route, PEER.peer_id, f"{route}/p2p/{PEER.text}")


def test_the_example_is_good() -> None:
    assert parse_peer_address(EXAMPLE).peer == PEER.peer_id


def test_space_around_and_the_old_name_of_p2p_are_mended() -> None:
    assert parse_peer_address(f"  /ip4/203.0.113.7/tcp/31337/ipfs/{EXAMPLE_PEER}\n").text == EXAMPLE


def test_ipv6_is_made_canonical() -> None:
    assert parse_listen_address("/ip6/0:0:0:0:0:0:0:1/tcp/5") == "/ip6/::1/tcp/5"


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (f"/ip/203.0.113.7/tcp/31337/p2p/{EXAMPLE_PEER}", "'ip'"),
        (f"/ip4/203.0.113.7 /tcp/31337/p2p/{EXAMPLE_PEER}", "'203.0.113.7 '"),
        (f"/ip4/203.0.113/tcp/31337/p2p/{EXAMPLE_PEER}", "'203.0.113'"),
        (f"/ip4/203.0.113.7/tcp/99999/p2p/{EXAMPLE_PEER}", "'99999'"),
        (f"/ip4/203.0.113.7/tcp/0/p2p/{EXAMPLE_PEER}", "'0'"),
        (f"/ip4/0.0.0.0/tcp/1/p2p/{EXAMPLE_PEER}", "'0.0.0.0'"),
        ("/ip4/203.0.113.7/tcp/31337", "/p2p/"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/12D3nonsense", "'12D3nonsense'"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC", "'Qmcgpsy"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{EXAMPLE_PEER}/p2p", "'p2p'"),
        (f"/ip4/203.0.113.7/sctp/31337/p2p/{EXAMPLE_PEER}", "'sctp'"),
        (f"/ip4/203.0.113.7/p2p/{EXAMPLE_PEER}", "''"),
        (f"/tcp/31337/p2p/{EXAMPLE_PEER}", "'tcp'"),
        (f"/p2p-circuit/p2p/{EXAMPLE_PEER}", "'p2p-circuit'"),
        (f"203.0.113.7:31337/p2p/{EXAMPLE_PEER}", "'203.0.113.7:31337'"),
        ("", "''"),
        ("/", "''"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/" + "1" * 600, "longer"),
        (f"/ip4/203.0.113.7/tcp/31\x00/p2p/{EXAMPLE_PEER}", "space"),
    ],
)
def test_a_bad_address_is_refused_by_the_token_that_is_wrong(text: str, token: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_peer_address(text)
    assert token in str(caught.value)
    assert EXAMPLE in str(caught.value)


def test_the_own_address_is_refused() -> None:
    with pytest.raises(AddressError, match="own"):
        parse_peer_address(EXAMPLE, own=PEER.peer_id)


def test_a_listen_address_has_an_ip_address_and_may_have_port_0() -> None:
    assert parse_listen_address("/ip4/0.0.0.0/tcp/0") == "/ip4/0.0.0.0/tcp/0"
    for text in ("/dns4/node.example.org/tcp/1", EXAMPLE, "/ip4/0.0.0.0/udp/1"):
        with pytest.raises(AddressError, match="good: /ip4/0"):
            parse_listen_address(text)


def test_an_announced_address_can_be_dialled_and_has_no_peer() -> None:
    assert parse_announce_address("/dns4/node.example.org/tcp/31337") == "/dns4/node.example.org/tcp/31337"
    for text in ("/ip4/0.0.0.0/tcp/1", "/ip4/203.0.113.7/tcp/0", EXAMPLE):
        with pytest.raises(AddressError, match="good: /dns4"):
            parse_announce_address(text)


def test_parts_of_a_listen_address() -> None:
    assert socket_address("/ip6/::1/udp/4001/quic-v1") == ("udp", "::1", 4001)
    assert with_port("/ip6/::1/udp/0/quic-v1", 4001) == "/ip6/::1/udp/4001/quic-v1"
    assert is_loopback("/ip4/127.0.0.1/tcp/1")
    assert not is_loopback("/ip4/0.0.0.0/tcp/1")
    assert not is_loopback("/dns4/localhost/tcp/1")
