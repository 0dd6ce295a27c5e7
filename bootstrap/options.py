"""How a bootstrap node runs; apart from the node itself, so that reading a command line loads no hivemind."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.errors import UsageError
from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address
from spes_p2p.network.quotas import QuotaLimits

LISTEN_IP4 = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
LISTEN_IP6 = ("/ip6/::/tcp/0", "/ip6/::/udp/0/quic-v1")
DEFAULT_METRICS = "127.0.0.1:0"
NO_METRICS = "off"
DEFAULT_CACHE_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """How a bootstrap node runs. Addresses are text as a person typed it."""

    data_dir: Path
    listen: tuple[str, ...] = ()
    """Port 0: a free one, chosen at the first start and kept. Empty: TCP and QUIC, on IPv4 and, where the machine has
    it, IPv6."""
    announce: tuple[str, ...] = ()
    """What others shall dial, if that is not what this machine sees of itself."""
    peers: tuple[str, ...] = ()
    """Other bootstrap nodes."""
    metrics: str = DEFAULT_METRICS
    """HOST:PORT of health and metrics, port 0: as above; `off`: nowhere."""
    quotas: QuotaLimits = field(default_factory=QuotaLimits)
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """For manifests and certificates of all runs together."""
    mirror_bytes: int = 0
    """For blobs of all runs together; 0: no mirror."""

    def check(self) -> None:
        """Raise AddressError or UsageError for the first malformed address; before anything is made."""
        for text in self.listen:
            parse_listen_address(text)
        for text in self.announce:
            parse_announce_address(text)
        for text in self.peers:
            parse_peer_address(text)
        parse_metrics(self.metrics)


def default_listen() -> tuple[str, ...]:
    """Everything that the daemon and this machine can do."""
    return LISTEN_IP4 + (LISTEN_IP6 if has_ip6() else ())


def has_ip6() -> bool:
    """Whether this machine can listen on IPv6."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def parse_metrics(text: str) -> tuple[str, int] | None:
    """(IP address, port) of `HOST:PORT` or `[IPV6]:PORT`; None for `off`. Raises UsageError."""
    if text == NO_METRICS:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise _wrong_metrics(text, f"{host!r} is no IP address") from error
    if not port.isdecimal() or int(port) > 65535:
        raise _wrong_metrics(text, f"{port!r} is no port")
    return host, int(port)


def _wrong_metrics(text: str, problem: str) -> UsageError:
    return UsageError(f"--metrics {text}: {problem}; good: 127.0.0.1:9464, [::1]:9464, off")
