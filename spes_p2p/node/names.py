"""Peers by name, for people."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.crypto import peer_text
from spes_p2p.ids import PeerId

_SHOWN_CHARACTERS = 8
_MAX_NAMED = 8


def short_names(peers: Iterable[PeerId]) -> str:
    """The ends of their peer ids, whose beginnings are the same for all: `…QyXSeuHy, …DZWDSx7A and 3 more`."""
    names = [f"…{peer_text(peer)[-_SHOWN_CHARACTERS:]}" for peer in sorted(peers)]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
