"""How a bootstrap node runs; apart from the node itself, so that reading a command line loads no hivemind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapOptions:
    """How a bootstrap node runs. Addresses are text as a person typed it."""

    data_dir: Path
    listen: tuple[str, ...] = DEFAULT_LISTEN
    """Port 0: a free one, chosen at the first start and kept."""
    announce: tuple[str, ...] = ()
    """What others shall dial, if that is not what this machine sees of itself."""
    peers: tuple[str, ...] = ()
    """Other bootstrap nodes."""

    def check(self) -> None:
        """Raise AddressError for the first malformed address; before anything is made."""
        for text in self.listen:
            parse_listen_address(text)
        for text in self.announce:
            parse_announce_address(text)
        for text in self.peers:
            parse_peer_address(text)
