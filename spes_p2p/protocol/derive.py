"""The pure functions that cost a machine most, as it calls them: their results follow from their arguments alone.

What they give is frozen. A process with many machines may therefore give them a `Derive` that remembers, so that they
share it (`testing/sim/shared.py`); a node has one machine, and nothing to remember.
"""

from __future__ import annotations

from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.codec import decode
from spes_p2p.protocol.head import Head, Terms, next_head
from spes_p2p.protocol.messages import Manifest, Message, Receipt
from spes_p2p.protocol.receipts import check_receipt
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.transition import Transition, advance


class Derive:
    """Every result made anew."""

    def message(self, data: bytes, sender: PeerId | None = None) -> Message:
        """`codec.decode`."""
        return decode(data, sender)

    def head(self, head: Head, body: Body) -> Head:
        """`head.next_head`."""
        return next_head(head, body)

    def transition(self, terms: Terms, cut: Digest, items: tuple[Item, ...], verifier: Verifier) -> Transition:
        """`transition.advance`, of a cut that is checked."""
        return advance(terms, cut, items, verifier)

    def check_receipt(
        self, terms: Terms, receipt: Receipt, author: PeerId, manifest: Manifest, verifier: Verifier
    ) -> None:
        """`receipts.check_receipt`."""
        check_receipt(terms, receipt, author, manifest, verifier)
