"""Machines of their own for the peers of a live swarm: Linux network namespaces, whose cables can be pulled.

    switch namespace:  bridge left -- trunk -- bridge right
    each host:         a namespace with eth0, a veth pair to a port of one of the two bridges

Nothing is made in the namespace of the test itself. Removing the namespaces removes everything in them.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from spes_p2p.config import RunConfig
from spes_p2p.errors import MachineError
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.testing.live import LiveSwarm

_MADE_BY = re.compile(r"spes-(\d+)-")
_NETNS_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_FORBIDDEN = ("Operation not permitted", "Permission denied", "not supported")


class ForbiddenError(MachineError):
    """The kernel lets this user make no network namespaces."""


class Networks:
    """A network of hosts on two bridges, `left` and `right`. Made by `networks`."""

    def __init__(self, left: Sequence[str], right: Sequence[str]) -> None:
        self._prefix = f"spes-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._hosts = {name: number for number, name in enumerate((*left, *right), start=1)}
        self._left, self._right = tuple(left), tuple(right)

    def make(self) -> None:
        """Make the namespaces. Raises ForbiddenError, or MachineError if that fails for another reason."""
        self._ip("netns", "add", self._switch)
        for bridge in ("left", "right"):
            self._in_switch("link", "add", bridge, "type", "bridge")
            self._in_switch("link", "set", bridge, "up")
        self._in_switch("link", "add", "trunk", "type", "veth", "peer", "name", "knurt")
        self._plug("trunk", "left")
        self._plug("knurt", "right")
        for bridge, names in (("left", self._left), ("right", self._right)):
            for name in names:
                self._make_host(name, bridge)

    def _make_host(self, name: str, bridge: str) -> None:
        host, port = self.namespace(name), self._port(name)
        self._ip("netns", "add", host)
        self._in_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        self._plug(port, bridge)
        self._ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", host, "link", "set", device, "up")

    def _plug(self, port: str, bridge: str) -> None:
        self._in_switch("link", "set", port, "master", bridge)
        self._in_switch("link", "set", port, "up")

    def remove(self) -> None:
        """Remove the namespaces that are there, and those of processes that have ended without doing so."""
        for path in _NETNS_FOLDER.glob("spes-*"):
            made_by = _MADE_BY.match(path.name)
            if path.name.startswith(f"{self._prefix}-") or (made_by and not psutil.pid_exists(int(made_by[1]))):
                self._ip("netns", "delete", path.name)

    def namespace(self, name: str) -> str:
        """A host's namespace."""
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        """A host's IPv4 address."""
        return f"10.77.0.{self._hosts[name]}"

    def pull(self, name: str) -> None:
        """Pull a host's cable."""
        self._in_switch("link", "set", self._port(name), "down")

    def plug_in(self, name: str) -> None:
        """Put a host's cable back."""
        self._in_switch("link", "set", self._port(name), "up")

    def part(self) -> None:
        """Pull the cable between the two bridges."""
        self._in_switch("link", "set", "trunk", "down")

    def heal(self) -> None:
        """Put it back."""
        self._in_switch("link", "set", "trunk", "up")

    def _port(self, name: str) -> str:
        return f"port{self._hosts[name]}"

    def _in_switch(self, *arguments: str) -> None:
        self._ip("-n", self._switch, *arguments)

    def _ip(self, *arguments: str) -> None:
        try:
            done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise MachineError("network namespaces need the command `ip`: install iproute2") from error
        if done.returncode != 0:
            kind = ForbiddenError if any(words in done.stderr for words in _FORBIDDEN) else MachineError
            raise kind(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def networks(left: Sequence[str], right: Sequence[str]) -> Iterator[Networks]:
    """A network that is gone when the context closes. Raises ForbiddenError, MachineError."""
    made = Networks(left, right)
    made.remove()
    try:
        made.make()
        yield made
    finally:
        made.remove()


class PartedSwarm(LiveSwarm):
    """A live swarm whose processes live on the hosts of a network, by name."""

    ports_are_local = False

    def __init__(self, folder: Path, config: RunConfig, hosts: Networks) -> None:
        super().__init__(folder, config)
        self._network = hosts
        self._visitors: dict[str, ThreadPoolExecutor] = {}
        """Threads that are on a host, since a node's local API answers nowhere else."""

    def listen_address(self, name: str) -> str:
        """On the host's address."""
        return f"/ip4/{self._network.address(name)}/tcp/0"

    def within(self, name: str) -> tuple[str, ...]:
        """A start on the host."""
        return "nsenter", f"--net={_NETNS_FOLDER / self._network.namespace(name)}", "--"

    def look(self, name: str) -> NodeSnapshot | None:
        """The node's snapshot; None while it does not answer."""
        if name not in self._visitors:
            place = _NETNS_FOLDER / self._network.namespace(name)
            self._visitors[name] = ThreadPoolExecutor(1, initializer=_enter, initargs=(place,))
        return self._visitors[name].submit(super().look, name).result()

    def end(self) -> None:
        """End everything and look for what is left."""
        for visitor in self._visitors.values():
            visitor.shutdown()
        super().end()


def _enter(namespace: Path) -> None:
    """Move the calling thread, and no other, into a network namespace."""
    with namespace.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise MachineError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
