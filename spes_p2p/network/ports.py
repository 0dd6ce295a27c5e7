"""Ports to listen on: whether they are free, and which one is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from spes_p2p.errors import MachineError
from spes_p2p.network.addresses import socket_address


def check_ports_free(listen: Iterable[str]) -> None:
    """Raise MachineError naming the first listen address whose port is taken.

    libp2p sets SO_REUSEPORT, so that two daemons of one user would share a port without noticing.
    """
    for text in listen:
        transport, host, port = socket_address(text)
        if not port:
            continue
        with _socket(transport, host) as probe:
            if transport == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a past run may linger
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _cannot_listen(text, port, error) from error


def _cannot_listen(text: str, port: int, error: OSError) -> MachineError:
    if error.errno == errno.EADDRINUSE:
        return MachineError(f"port {port} is in use by another program ({text}): stop it or listen on another port")
    return MachineError(f"cannot listen on {text}: {error.strerror}")


def free_port(transport: str, host: str) -> int:
    """A port that is free now, for "tcp" or "udp" on an IP address. Raises MachineError if the address is not ours."""
    with _socket(transport, host) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise MachineError(f"cannot listen on {host}: {error.strerror}") from error
        return int(probe.getsockname()[1])


def _socket(transport: str, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)
    if family == socket.AF_INET6:
        # as libp2p does it: an IPv6 address leaves the same port of IPv4 free
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return probe
