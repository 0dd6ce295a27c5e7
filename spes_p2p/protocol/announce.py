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
        self._sources: list[PeerId] = []
        self._strangers = 0
        self._turn = 0
        self._due_ms = 0

    def told(self, peer: PeerId, now_ms: int, *, is_member: bool, may_decide: bool) -> None:
        """A peer is past this round. `may_decide`: the votes are probably on their way here too, so wait a little."""
        if peer in self._sources or (not is_member and self._strangers >= _MAX_STRANGERS):
            return
        if not self._sources:
            self._due_ms = now_ms + (self._resend_ms // 4 if may_decide else 0)
        self._sources.append(peer)
        self._strangers += not is_member

    def next(self, now_ms: int) -> PeerId | None:
        """Whom to ask now, if it is time."""
        if not self._sources or now_ms < self._due_ms:
            return None
        peer = self._sources[self._turn % len(self._sources)]
        self._turn += 1
        self._due_ms = now_ms + self._resend_ms
        return peer

    def deadline_ms(self) -> int | None:
        """When to ask next."""
        return self._due_ms if self._sources else None
