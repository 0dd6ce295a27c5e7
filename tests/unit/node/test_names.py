"""Peers in few words."""

from __future__ import annotations

from spes_p2p.node.names import short_names
from spes_p2p.testing import protocol_cases as cases


def test_eight_are_named_and_the_others_counted() -> None:
    peers = sorted(cases.identities(10), key=lambda peer: peer.peer_id)
    names = [f"…{peer.text[-8:]}" for peer in peers]
    assert short_names(peer.peer_id for peer in peers[:2]) == f"{names[0]}, {names[1]}"
    assert short_names(peer.peer_id for peer in reversed(peers)) == ", ".join(names[:8]) + " and 2 more"
