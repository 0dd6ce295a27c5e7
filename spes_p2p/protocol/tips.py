"""Which peer's tip to follow: the highest that somebody claims, until it proves to be a lie. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.questions import Tip


class Tips:
    """Claims of several peers about their newest final certificate. Nothing of them is believed."""

    def __init__(self, claims: Mapping[PeerId, Tip]) -> None:
        self._claims = dict(claims)
        self._slow: set[PeerId] = set()
        self.dropped: dict[PeerId, str] = {}
        """Who is not asked any more, and why."""

    def best(self, above: int) -> tuple[PeerId, Tip] | None:
        """Whom to follow: the highest claim above a round, of the highest epoch, of equal ones the lowest peer id.
        Those who were slow come last, and after the others those who lack certificates right above the round."""

        def merit(choice: tuple[PeerId, Tip]) -> tuple[bool, int, bool, int]:
            peer, tip = choice
            return peer not in self._slow, tip.epoch, tip.first <= above + 1, tip.round

        return max(((p, t) for p, t in sorted(self._claims.items()) if t.round > above), key=merit, default=None)

    def with_round(self, number: int) -> PeerId | None:
        """Somebody who claims to have the certificate of a round and those after it; None: nobody does."""
        having = (peer for peer, tip in sorted(self._claims.items()) if tip.first <= number <= tip.round)
        return min(having, key=lambda peer: peer in self._slow, default=None)

    def highest(self) -> int:
        """The highest round that is claimed by somebody who was not dropped; 0: nobody has any."""
        return max((tip.round for tip in self._claims.values()), default=0)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Do not follow this peer any more."""
        self._claims.pop(peer, None)
        self.dropped[peer] = reason

    def postpone(self, peer: PeerId) -> None:
        """Prefer others: this one is slow."""
        self._slow.add(peer)

    def contradicted(self, certified: Mapping[tuple[int, int], Digest]) -> tuple[PeerId, ...]:
        """Who claims another certificate than the certified one of an epoch and round, by peer id."""
        return tuple(
            peer
            for peer, tip in sorted(self._claims.items())
            if certified.get((tip.epoch, tip.round), tip.hash) != tip.hash
        )
