"""The bootstrap node: a DHT server and relay with a lasting address, that introduces the peers of any run.

It holds no key of a run, votes on nothing and can be lost: members find each other without it. Its data folder holds
its identity and the ports it listens on, so that its address stays the same over restarts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from spes_p2p.bootstrap.options import BootstrapOptions
from spes_p2p.crypto import Identity
from spes_p2p.errors import LocalStateError
from spes_p2p.network.addresses import parse_listen_address, socket_address, with_port
from spes_p2p.network.ports import check_ports_free, free_port
from spes_p2p.storage.atomic import write_file
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.lock import FolderLock

if TYPE_CHECKING:
    from spes_p2p.network.transport import P2PTransport

IDENTITY_FILE = "identity.key"
PORTS_FILE = "ports.json"


class BootstrapNode:
    """A running bootstrap node. Made by `start`."""

    def __init__(self, identity: Identity, lock: FolderLock, transport: P2PTransport) -> None:
        self._identity = identity
        self._lock = lock
        self._transport = transport

    @classmethod
    async def start(cls, options: BootstrapOptions) -> BootstrapNode:
        """Start listening.

        Raises AddressError, IdentityError if the folder's node runs already or its identity is damaged, and
        MachineError if a port is in use.
        """
        options.check()
        lock = FolderLock(options.data_dir)
        try:
            identity = load_or_create_identity(options.data_dir / IDENTITY_FILE)
            listen = lasting_ports(options.data_dir / PORTS_FILE, options.listen)
            check_ports_free(listen)
            # after all that can be said at once: this loads hivemind, which takes seconds
            from spes_p2p.network.transport import NetworkOptions, P2PTransport

            transport = await P2PTransport.create(
                identity,
                DiskBlobs(options.data_dir / "blobs"),
                NetworkOptions(
                    identity_path=options.data_dir / IDENTITY_FILE,
                    listen=listen,
                    announce=options.announce,
                    initial_peers=options.peers,
                    relay=True,
                    reach_timeout_s=None,
                ),
            )
        except BaseException:
            lock.close()
            raise
        return cls(identity, lock, transport)

    @property
    def transport(self) -> P2PTransport:
        """Its place on the network."""
        return self._transport

    async def addresses(self) -> tuple[str, ...]:
        """What to paste into an invite."""
        return await self._transport.addresses()

    async def wait_failed(self) -> BaseException:
        """Return the error that ends this node, if ever one comes."""
        return await self._transport.wait_failed()

    async def close(self) -> None:
        """End; nothing is left running."""
        await self._transport.close()
        self._lock.close()


def lasting_ports(path: Path, listen: tuple[str, ...]) -> tuple[str, ...]:
    """The listen addresses with every port 0 replaced by the one kept in the file, or by a free one, then kept.

    Raises LocalStateError if the file is damaged.
    """
    kept = _read_ports(path)
    chosen = dict(kept)
    result = []
    for text in map(parse_listen_address, listen):
        transport, host, port = socket_address(text)
        if not port:
            port = chosen.setdefault(text, free_port(transport, host))
        result.append(with_port(text, port))
    if chosen != kept:
        write_file(path, json.dumps(chosen, indent=1, sort_keys=True).encode())
    return tuple(result)


def _read_ports(path: Path) -> dict[str, int]:
    try:
        ports = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LocalStateError(f"{path} cannot be read: {error}\nDelete it to listen on another port.") from error
    if not isinstance(ports, dict) or not all(isinstance(port, int) and 0 < port < 65536 for port in ports.values()):
        raise LocalStateError(f"{path} does not hold ports\nDelete it to listen on another port.")
    return ports
