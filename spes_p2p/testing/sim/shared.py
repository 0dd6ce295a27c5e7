"""What many machines of one simulated swarm share: frozen results of pure functions, worked out once.

The machines are the very same: they call these functions through `protocol.derive.Derive`. Every swarm shares what
messages are parsed to. A large one shares what follows from a certificate as well: 1,000 peers would make 1,000 equal
states of 1,000 members, and each of 128 voters would check the same acks in the same 1,000 receipts. In a small swarm
each machine works that out by itself, so that one that comes to something else is found.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TypeAlias

from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import body_hash, decode, receipt_hash
from spes_p2p.protocol.derive import Derive
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import Manifest, Message, Receipt
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import Transition

LARGE_SWARM = 129
"""More than there can be voters: from here on machines share what follows from a certificate."""

_MESSAGES_PER_PEER = 256
_FEWEST_MESSAGES = 8192
_ROUNDS_KEPT = 3

Side: TypeAlias = tuple[PeerId, ...]


def deriving(num_peers: int) -> Derive:
    """For the machines of a swarm that begins with so many peers."""
    return SharedState(num_peers) if num_peers >= LARGE_SWARM else SharedMessages(num_peers)


class SharedMessages(Derive):
    """A message goes to many, who share what it is parsed to. Remembers as many as may be on their way at once."""

    def __init__(self, num_peers: int) -> None:
        self._parsed = functools.lru_cache(maxsize=max(_FEWEST_MESSAGES, _MESSAGES_PER_PEER * num_peers))(decode)

    def message(self, data: bytes, sender: PeerId | None = None) -> Message:
        """`decode`, once for all. An error names no sender."""
        return self._parsed(data)


@dataclass(slots=True)
class _After:
    """What follows from one head."""

    head: Head
    """Kept, so that no other object gets its id."""
    heads: dict[Digest, Head] = field(default_factory=dict)
    """By body."""
    transitions: dict[tuple[Side, Digest], Transition] = field(default_factory=dict)
    """By cut, whose hash says what its items are."""
    receipts: set[tuple[Side, Digest]] = field(default_factory=set)
    """Those that hold; the hash of one says whose it is, and of which manifest."""


class SharedState(SharedMessages):
    """Heads, transitions and checked receipts of the newest rounds too. Errors are not remembered."""

    def __init__(self, num_peers: int) -> None:
        super().__init__(num_peers)
        self._known: dict[int, _After] = {}
        """By the id of a head: equal heads of machines that know different things are not the same."""
        self._newest = 0

    def head(self, head: Head, body: Body) -> Head:
        """`next_head`, once for all that are on the same head."""
        after, identity = self._after(head), body_hash(body)
        if identity not in after.heads:
            after.heads[identity] = super().head(head, body)
        return after.heads[identity]

    def transition(self, terms: Terms, cut: Digest, items: tuple[Item, ...], verifier: Verifier) -> Transition:
        """`advance`, once for all that are on the same head."""
        after, key = self._after(terms.head), (terms.side, cut)
        if key not in after.transitions:
            after.transitions[key] = super().transition(terms, cut, items, verifier)
        return after.transitions[key]

    def check_receipt(
        self, terms: Terms, receipt: Receipt, author: PeerId, manifest: Manifest, verifier: Verifier
    ) -> None:
        """`check_receipt`, once for all that are on the same head."""
        after, key = self._after(terms.head), (terms.side, receipt_hash(receipt))
        if key not in after.receipts:
            super().check_receipt(terms, receipt, author, manifest, verifier)
            after.receipts.add(key)

    def _after(self, head: Head) -> _After:
        known = self._known.get(id(head))
        if known is None:
            self._newest = max(self._newest, head.round)
            oldest = self._newest - _ROUNDS_KEPT
            self._known = {key: after for key, after in self._known.items() if after.head.round > oldest}
            known = self._known[id(head)] = _After(head)
        return known
