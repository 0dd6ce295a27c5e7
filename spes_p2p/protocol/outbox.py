"""Messages that are repeated until the transport confirms them, or until their round is long over."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from spes_p2p.ids import PeerId
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
        self._due: list[tuple[int, int]] = []
        """(due, ticket), a heap; what was delivered, or is due later now, is skipped."""
        self._known: dict[tuple[PeerId, bytes], int] = {}
        self._next_ticket = 1

    def add(self, to: PeerId, data: bytes, *, round_number: int, now_ms: int) -> Send | None:
        """The first `Send` of a message; None if it was sent to this peer already."""
        key = (to, data)
        if key in self._known:
            return None
        send = Send(ticket=self._next_ticket, to=to, data=data)
        self._next_ticket += 1
        self._known[key] = round_number
        self._pending[send.ticket] = _Pending(send, round_number, now_ms + self._resend_ms, 1)
        heapq.heappush(self._due, (now_ms + self._resend_ms, send.ticket))
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
        at = self.deadline_ms()
        while at is not None and at <= now_ms:
            ticket = self._due[0][1]
            pending = self._pending[ticket]
            pending.tries += 1
            pending.due_ms = now_ms + self._resend_ms * min(pending.tries, _MAX_BACKOFF)
            heapq.heapreplace(self._due, (pending.due_ms, ticket))
            found.append(pending.send)
            at = self.deadline_ms()
        return found

    def deadline_ms(self) -> int | None:
        """When the next message is due."""
        while self._due and not self._is_due(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _is_due(self, due_ms: int, ticket: int) -> bool:
        pending = self._pending.get(ticket)
        return pending is not None and pending.due_ms == due_ms

    def expire(self, before_round: int) -> None:
        """Forget messages of rounds before this one."""
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.round < before_round]:
            del self._pending[ticket]
        self._known = {key: number for key, number in self._known.items() if number >= before_round}
