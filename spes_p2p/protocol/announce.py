"""Certificates are announced, and whoever lacks one asks for it (docs/protocol.md, section 4, 6).

A certificate is as long as everything else that a voter sends in a round, and most voters decide by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.ids import PeerId
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.head import Terms

_MAX_STRANGERS = 64
"""Peers outside the roster whose word is taken: a joiner knows no others at first."""


def audience_of(terms: Terms, certificate: Certificate, me: PeerId, joiners: Iterable[PeerId]) -> list[PeerId]:
    """Whom a voter tells of a certificate: the voters; the leader of its view and the next f tell the members and those
    who ask to join as well. Of a recovery all who hear of it tell everybody."""
    order = terms.leaders
    place = certificate.view % len(order)
    announcing = [order[(place + step) % len(order)] for step in range(terms.num_faults + 1)]
    if me in announcing or certificate.body.epoch > terms.head.epoch:
        return sorted({*terms.members, *terms.voters, *joiners})
    return list(terms.voters)


class CertificatePull:
    """Whom to ask for the certificate of the open round: those who say that they have it, one after the other."""

    def __init__(self, resend_ms: int) -> None:
        self._resend_ms = resend_ms
        self._members: list[PeerId] = []
        self._strangers: list[PeerId] = []
        self._turn = 0
        self._due_ms = 0

    def told(self, peer: PeerId, now_ms: int, *, is_member: bool, may_decide: bool) -> None:
        """A peer is past this round. `may_decide`: the votes are probably on their way here too, so wait a little."""
        sources = self._members if is_member else self._strangers
        if peer in sources or (not is_member and len(sources) >= _MAX_STRANGERS):
            return
        if not self._members and not self._strangers:
            self._due_ms = now_ms + (self._resend_ms // 4 if may_decide else 0)
        sources.append(peer)

    def next(self, now_ms: int) -> PeerId | None:
        """Whom to ask now, if it is time: members and strangers by turns, since anybody can be many strangers."""
        kinds = [sources for sources in (self._members, self._strangers) if sources]
        if not kinds or now_ms < self._due_ms:
            return None
        sources = kinds[self._turn % len(kinds)]
        peer = sources[self._turn // len(kinds) % len(sources)]
        self._turn += 1
        self._due_ms = now_ms + self._resend_ms
        return peer

    def deadline_ms(self) -> int | None:
        """When to ask next."""
        return self._due_ms if self._members or self._strangers else None
