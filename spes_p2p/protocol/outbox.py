"""Messages that are repeated until the transport confirms them, or until their round is long over."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.digests import digest
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.effects import Send

_MAX_BACKOFF = 4


@dataclass(slots=True)
class _Pending:
    send: Send
    round: int
    due_ms: int
    tries: int


class Outbox:
    """What still has to reach its addressee. The same bytes go to the same peer once, until they expire."""

    def __init__(self, resend_ms: int) -> None:
        self._resend_ms = resend_ms
        self._pending: dict[int, _Pending] = {}
        self._known: dict[tuple[PeerId, Digest], int] = {}
        self._next_ticket = 1

    def add(self, to: PeerId, data: bytes, *, round_number: int, now_ms: int) -> Send | None:
        """The first `Send` of a message; None if it was sent to this peer already."""
        key = (to, digest("outbox", data))
        if key in self._known:
            return None
        send = Send(ticket=self._next_ticket, to=to, data=data)
        self._next_ticket += 1
        self._known[key] = round_number
        self._pending[send.ticket] = _Pending(send, round_number, now_ms + self._resend_ms, 1)
        return send

    def once(self, to: PeerId, data: bytes) -> Send:
        """A `Send` that is not repeated: a request, or an answer to one."""
        send = Send(ticket=self._next_ticket, to=to, data=data)
        self._next_ticket += 1
        return send

    def delivered(self, ticket: int) -> None:
        """The transport confirmed it."""
        self._pending.pop(ticket, None)

    def due(self, now_ms: int) -> list[Send]:
        """Messages to repeat now; each waits longer the more often it failed."""
        found = []
        for pending in self._pending.values():
            if pending.due_ms <= now_ms:
                pending.tries += 1
                pending.due_ms = now_ms + self._resend_ms * min(pending.tries, _MAX_BACKOFF)
                found.append(pending.send)
        return found

    def deadline_ms(self) -> int | None:
        """When the next message is due."""
        return min((pending.due_ms for pending in self._pending.values()), default=None)

    def expire(self, before_round: int) -> None:
        """Forget messages of rounds before this one."""
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.round < before_round]:
            del self._pending[ticket]
        self._known = {key: number for key, number in self._known.items() if number >= before_round}
