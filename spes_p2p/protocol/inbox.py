"""Messages of the next round, kept until it opens; and how often a peer is asked or answered."""

from __future__ import annotations

from spes_p2p.ids import PeerId
from spes_p2p.protocol.messages import (
    BodyMessage,
    Certificate,
    Cut,
    CutMessage,
    Message,
    Offer,
    ProposalMessage,
    Receipt,
    Signed,
    Want,
)

MAX_KEPT_PER_PEER = 256
MAX_KEPT_BYTES_PER_PEER = 4 << 20


def round_of(message: Message) -> int:
    """The round a message belongs to; -1 for those that belong to none."""
    match message:
        case Signed():
            return message.body.round
        case Receipt():
            return max((ack.body.round for ack in message.acks), default=-1)
        case CutMessage():
            return message.cut.round
        case ProposalMessage() | BodyMessage() | Certificate():
            return message.body.round
        case Offer() | Want() | Cut():
            return message.round
        case _:
            return -1


class Inbox:
    """Bounded per peer."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[PeerId, bytes]]] = {}
        self._asked_at_ms: dict[PeerId, int] = {}
        self._answered_at_ms: dict[tuple[PeerId, int], int] = {}

    def keep(self, round_number: int, sender: PeerId, data: bytes) -> None:
        """Keep a message of the next round; beyond the bound it is dropped (its sender repeats it)."""
        kept = self._kept.setdefault(round_number, [])
        mine = [len(other) for peer, other in kept if peer == sender]
        if len(mine) < MAX_KEPT_PER_PEER and sum(mine) + len(data) <= MAX_KEPT_BYTES_PER_PEER:
            kept.append((sender, data))

    def take(self, round_number: int) -> list[tuple[PeerId, bytes]]:
        """Messages kept for a round that opens now; those of older rounds are forgotten."""
        found = self._kept.pop(round_number, [])
        self._kept = {number: kept for number, kept in self._kept.items() if number > round_number}
        self._asked_at_ms.clear()
        self._answered_at_ms = {key: at for key, at in self._answered_at_ms.items() if key[1] >= round_number - 3}
        return found

    def may_ask(self, peer: PeerId, now_ms: int, pause_ms: int) -> bool:
        """Whether to ask a peer for its tip now."""
        last = self._asked_at_ms.get(peer)
        if last is not None and now_ms < last + pause_ms:
            return False
        self._asked_at_ms[peer] = now_ms
        return True

    def may_answer(self, peer: PeerId, round_number: int, now_ms: int, pause_ms: int) -> bool:
        """Whether to send a peer the certificate of an old round now."""
        last = self._answered_at_ms.get((peer, round_number))
        if last is not None and now_ms < last + pause_ms:
            return False
        self._answered_at_ms[peer, round_number] = now_ms
        return True
