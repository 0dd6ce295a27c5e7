"""Messages of the next round, kept until it opens; and how often a peer is asked or answered."""

from __future__ import annotations

from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Certificate, Cut
from spes_p2p.protocol.messages import (
    BodyMessage,
    CutMessage,
    Decided,
    HalfIn,
    Message,
    Offer,
    ProposalMessage,
    Receipt,
    Seen,
    Signed,
    Want,
)
from spes_p2p.protocol.params import MAX_PARKED_BYTES_PER_PEER, MAX_PARKED_PER_PEER, MAX_PEERS_REMEMBERED

MAX_KEPT_PER_PEER = 256
MAX_KEPT_BYTES_PER_PEER = 4 << 20
"""Of one member; and of all strangers together, who may be members of the next round."""

MAX_ANSWERS_PER_PAUSE = 64
"""Certificates sent to one peer that asks, and announced to one that is behind, per pause."""


def round_of(message: Message) -> int:
    """The round a message belongs to; -1 for those that belong to none."""
    match message:
        case Signed():
            return message.body.round
        case CutMessage():
            return message.cut.round
        case ProposalMessage() | BodyMessage() | Certificate():
            return message.body.round
        case Receipt() | Offer() | Want() | Cut() | Decided() | HalfIn() | Seen():
            return message.round
        case _:
            return -1


class Parked:
    """Messages of other ballots of the open round, or of the height, bounded per sender."""

    def __init__(self) -> None:
        self._kept: dict[bytes, list[tuple[PeerId, bytes]]] = {}
        self._used: dict[PeerId, tuple[int, int]] = {}

    def keep(self, branch: bytes, sender: PeerId, data: bytes) -> None:
        """Keep a message; beyond the bound it is dropped, and is sent again when its ballot is asked for."""
        messages, size_bytes = self._used.get(sender, (0, 0))
        if messages < MAX_PARKED_PER_PEER and size_bytes + len(data) <= MAX_PARKED_BYTES_PER_PEER:
            self._used[sender] = (messages + 1, size_bytes + len(data))
            self._kept.setdefault(branch, []).append((sender, data))

    def take(self, branch: bytes) -> list[tuple[PeerId, bytes]]:
        """Messages of a ballot that opens now."""
        found = self._kept.pop(branch, [])
        for sender, data in found:
            messages, size_bytes = self._used[sender]
            self._used[sender] = (messages - 1, size_bytes - len(data))
        return found

    def new_round(self, *, height: bool) -> None:
        """Another round is open: tentative attempts of the old one are over; with the height the final ballot, too."""
        final = [] if height else self._kept.get(b"", [])
        self._kept.clear()
        self._used.clear()
        for sender, data in final:
            self.keep(b"", sender, data)


class Inbox:
    """Bounded per member, and for all strangers together."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[PeerId, bytes]]] = {}
        self._used: dict[PeerId | None, tuple[int, int]] = {}
        """Member, or None for strangers -> (messages, bytes) kept."""
        self._asked_at_ms: dict[PeerId, int] = {}
        self._answered_at_ms: dict[PeerId, dict[int, int]] = {}
        self._announced_at_ms: dict[PeerId, dict[int, int]] = {}

    def keep(self, round_number: int, sender: PeerId, data: bytes, *, member: bool) -> bool:
        """Keep a message of the next round. False: beyond the bound, it is dropped and has to be asked for."""
        owner = sender if member else None
        messages, size_bytes = self._used.get(owner, (0, 0))
        if messages >= MAX_KEPT_PER_PEER or size_bytes + len(data) > MAX_KEPT_BYTES_PER_PEER:
            return False
        self._used[owner] = (messages + 1, size_bytes + len(data))
        self._kept.setdefault(round_number, []).append((sender, data))
        return True

    def take(self, round_number: int) -> list[tuple[PeerId, bytes]]:
        """Messages kept for a round that opens now; those of older rounds are forgotten."""
        found = self._kept.pop(round_number, [])
        self._kept.clear()
        self._used.clear()
        self._asked_at_ms.clear()
        return found

    def may_ask(self, peer: PeerId, now_ms: int, pause_ms: int) -> bool:
        """Whether to ask a peer for its tip now."""
        last = self._asked_at_ms.get(peer)
        if last is not None and now_ms < last + pause_ms:
            return False
        if last is None and len(self._asked_at_ms) >= MAX_PEERS_REMEMBERED:
            self._asked_at_ms.clear()
        self._asked_at_ms[peer] = now_ms
        return True

    def may_answer(self, peer: PeerId, round_number: int, now_ms: int, pause_ms: int) -> bool:
        """Whether to send a peer the certificate of an old round, or all of the open one, now."""
        return _is_time(self._answered_at_ms, peer, round_number, now_ms, pause_ms)

    def may_announce(self, peer: PeerId, round_number: int, now_ms: int, pause_ms: int) -> bool:
        """Whether to tell a peer now that there is a certificate of an old round."""
        return _is_time(self._announced_at_ms, peer, round_number, now_ms, pause_ms)


def _is_time(
    done_at_ms: dict[PeerId, dict[int, int]], peer: PeerId, round_number: int, now_ms: int, pause_ms: int
) -> bool:
    """Once per peer, round and pause, and not for too many rounds of one peer."""
    if peer not in done_at_ms and len(done_at_ms) >= MAX_PEERS_REMEMBERED:
        done_at_ms.clear()
    recent = {number: at for number, at in done_at_ms.get(peer, {}).items() if now_ms < at + pause_ms}
    if round_number in recent or len(recent) >= MAX_ANSWERS_PER_PAUSE:
        return False
    done_at_ms[peer] = recent | {round_number: now_ms}
    return True
