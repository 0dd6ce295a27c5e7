"""Multiaddresses at our border: read what a person typed, name the token that is wrong, show a good example.

Three kinds are met: the address of a peer to dial (`/ip4/../tcp/../p2p/..`), an address to listen on, and an address to
announce to others. Anything that passes here is canonical text that libp2p's daemon understands.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from multiaddr import Multiaddr, exceptions, protocols  # type: ignore[import-untyped]  # ships no types

from spes_p2p.crypto import peer_from_text
from spes_p2p.errors import AddressError
from spes_p2p.ids import PeerId

EXAMPLE_PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
EXAMPLE = f"/ip4/203.0.113.7/tcp/31337/p2p/{EXAMPLE_PEER}"
LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/31337"
ANNOUNCE_EXAMPLE = "/dns4/node.example.org/tcp/31337"

MAX_ADDRESS_CHARS = 512

_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_IP_HOSTS = ("ip4", "ip6")
_TAKES_NO_VALUE = ("quic-v1", "p2p-circuit")

Token = tuple[str, str]
"""(protocol, value); the value is empty for protocols that take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A checked address of a peer."""

    text: str
    """Canonical, the peer id included."""
    route: str
    """The same without the final `/p2p/<peer id>`: what the daemon dials."""
    peer: PeerId


def parse_peer_address(text: str, own: PeerId | None = None) -> PeerAddress:
    """Check an address of a peer to dial.

    Raises AddressError if it is malformed, names no peer, cannot be dialled, or is that of `own`.
    """
    tokens = _tokens(text, EXAMPLE)
    if tokens[-1][0] != "p2p":
        raise AddressError(f"address {text!r} has no /p2p/<peer id> at its end; good: {EXAMPLE}")
    try:
        peer = peer_from_text(tokens[-1][1])
    except ValueError as error:
        raise AddressError(f"address {text!r}: {error}; good: {EXAMPLE}") from error
    route = tokens[:-1]
    if "p2p-circuit" in [name for name, _ in route]:
        _check_relayed_route(text, route)
    else:
        _check_route(text, route, _HOSTS, EXAMPLE)
        _check_reachable(text, route, EXAMPLE)
    if peer == own:
        raise AddressError(
            f"address {text!r} is this node's own: give the address of another peer"
            " (if it belongs to another machine, that machine runs with a copy of this identity)"
        )
    return PeerAddress(text=_join(tokens), route=_join(route), peer=peer)


def parse_listen_address(text: str) -> str:
    """Check an address to listen on: an IP address and a port, 0 for any free one. Raises AddressError."""
    tokens = _tokens(text, LISTEN_EXAMPLE)
    _check_route(text, tokens, _IP_HOSTS, LISTEN_EXAMPLE)
    return _join(tokens)


def parse_announce_address(text: str) -> str:
    """Check an address that others shall dial to reach this node, without peer id. Raises AddressError."""
    tokens = _tokens(text, ANNOUNCE_EXAMPLE)
    _check_route(text, tokens, _HOSTS, ANNOUNCE_EXAMPLE)
    _check_reachable(text, tokens, ANNOUNCE_EXAMPLE)
    return _join(tokens)


def is_loopback(text: str) -> bool:
    """Whether a checked address begins with a loopback IP address."""
    host, value = _split(text)[0]
    return host in _IP_HOSTS and ipaddress.ip_address(value).is_loopback


def socket_address(text: str) -> tuple[str, str, int]:
    """("tcp" or "udp", IP address, port) of a checked listen address."""
    tokens = _split(text)
    return tokens[1][0], tokens[0][1], int(tokens[1][1])


def with_port(text: str, port: int) -> str:
    """A checked listen address with another port."""
    tokens = _split(text)
    tokens[1] = (tokens[1][0], str(port))
    return _join(tokens)


def _split(text: str) -> list[Token]:
    """(protocol, value) pairs of text whose form is known to be right."""
    parts = text.split("/")[1:]
    tokens: list[Token] = []
    while parts:
        name = parts.pop(0)
        tokens.append((name, "" if name in _TAKES_NO_VALUE else parts.pop(0)))
    return tokens


def _join(tokens: list[Token]) -> str:
    return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in tokens)


def _tokens(text: str, example: str) -> list[Token]:
    """The pairs of an address, each checked on its own. Raises AddressError naming the first bad token."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise AddressError(f"address {text[:40]!r}... is longer than {MAX_ADDRESS_CHARS} characters; good: {example}")
    if any(char.isspace() or not char.isprintable() for char in text.strip()):
        where = next(part for part in text.strip().split("/") if any(c.isspace() or not c.isprintable() for c in part))
        raise AddressError(f"address {text!r} has a space inside, at {where!r}; good: {example}")
    parts = text.strip().split("/")
    if parts[0] or len(parts) < 2:
        raise AddressError(f"address {text!r} must begin with '/', not with {parts[0]!r}; good: {example}")
    del parts[0]
    tokens: list[Token] = []
    while parts:
        name = parts.pop(0)
        name = "p2p" if name == "ipfs" else name
        _check_protocol(text, name, example)
        if name in _TAKES_NO_VALUE:
            tokens.append((name, ""))
            continue
        if not parts or not parts[0]:
            raise AddressError(f"address {text!r}: nothing follows {name!r}; good: {example}")
        tokens.append((name, _checked_value(text, name, parts.pop(0), example)))
    return tokens


def _check_protocol(text: str, name: str, example: str) -> None:
    known = (*_HOSTS, "tcp", "udp", "p2p", *_TAKES_NO_VALUE)
    if name in known:
        return
    try:
        protocols.protocol_with_name(name)
    except exceptions.ProtocolNotFoundError:
        guess = " (perhaps 'ip4' or 'ip6'?)" if name == "ip" else ""
        problem = f"{name!r} is not a protocol{guess}"
    else:
        problem = f"{name!r} is not supported here"
    raise AddressError(f"address {text!r}: {problem}; good: {example}")


def _checked_value(text: str, name: str, value: str, example: str) -> str:
    if name == "p2p":
        return value  # a peer id: its own check says more than multiaddr's
    try:
        canonical: str | None = Multiaddr(f"/{name}/{value}").value_for_protocol(name)
    except (exceptions.Error, ValueError) as error:
        raise AddressError(f"address {text!r}: {value!r} is no value for {name!r}; good: {example}") from error
    if not canonical:
        raise AddressError(f"address {text!r}: {value!r} is no value for {name!r}; good: {example}")
    return canonical


def _check_route(text: str, tokens: list[Token], hosts: tuple[str, ...], example: str) -> None:
    """A host, then tcp, or udp with quic-v1, and nothing else."""
    names = [name for name, _ in tokens]
    if not names or names[0] not in hosts:
        wrong = names[0] if names else ""
        raise AddressError(
            f"address {text!r} begins with {wrong!r}, not with one of {', '.join(hosts)}; good: {example}"
        )
    if names[1:] not in (["tcp"], ["udp", "quic-v1"]):
        wrong = "/".join(names[1:])
        raise AddressError(
            f"address {text!r}: {wrong!r} after the host, wanted /tcp/<port> or /udp/<port>/quic-v1; good: {example}"
        )


def _check_relayed_route(text: str, tokens: list[Token]) -> None:
    """The full address of a relay, then p2p-circuit."""
    if [name for name, _ in tokens[-2:]] != ["p2p", "p2p-circuit"]:
        raise AddressError(f"address {text!r}: 'p2p-circuit' must follow the relay's /p2p/<peer id>; good: {EXAMPLE}")
    _check_route(text, tokens[:-2], _HOSTS, EXAMPLE)
    _check_reachable(text, tokens[:-2], EXAMPLE)


def _check_reachable(text: str, tokens: list[Token], example: str) -> None:
    (host, value), (transport, port) = tokens[0], tokens[1]
    if host in _IP_HOSTS and ipaddress.ip_address(value).is_unspecified:
        raise AddressError(f"address {text!r}: {value!r} means 'any address' and cannot be dialled; good: {example}")
    if int(port) == 0:
        raise AddressError(f"address {text!r}: {transport} port '0' cannot be dialled; good: {example}")
