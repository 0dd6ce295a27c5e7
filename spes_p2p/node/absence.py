"""Names the members that a certified round went without, for people: once when it begins and once when it ends."""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.ids import PeerId
from spes_p2p.node.names import short_names
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import ItemKind

_FIRST_TRAINED_ROUND = 2


class Absence:
    """Compares each certificate with the roster before it. Own updates are told of in `own_updates`."""

    def __init__(self, peer: PeerId, notify: Callable[[str, str], None]) -> None:
        self._peer = peer
        self._notify = notify
        self._without: frozenset[PeerId] = frozenset()
        """Members whose update the last certificate lacks."""

    def adopted(self, before: Head, after: Head, body: Body) -> None:
        """`body` leads from `before` to `after`."""
        members = before.state.members
        if body.round < _FIRST_TRAINED_ROUND or self._peer not in members:
            return
        heard_of = {members[entry.who] for entry in body.entries if entry.who < len(members)}
        gave = {members[entry.who] for entry in body.entries if entry.kind is ItemKind.UPDATE}
        without = frozenset(members) - gave - {self._peer}
        gone = without - set(after.state.members)
        new = without - self._without
        self._tell("warning", f"round {body.round} went on without an update of", new & heard_of - gone)
        self._tell("warning", f"round {body.round} went on without a sign of life of", new - heard_of - gone)
        self._tell("warning", f"round {body.round} ended the membership of", gone)
        self._tell("info", f"round {body.round} has an update again of", self._without & gave)
        self._without = without - gone

    def _tell(self, level: str, words: str, peers: frozenset[PeerId]) -> None:
        if peers:
            self._notify(level, f"{words} {short_names(peers)}")
