"""Who gets one of a few places that all peers share. Pure: the clock is given.

share   places // (peers that hold one, or want one and have less than they may), at least 1
take    while a place is free: whoever holds less than the share, or anybody if no other peer wants one
yield   whoever holds more than the share while another peer wants one; it is asked where its work has a seam

A peer wants a place for WANT_S after it was turned away because none was free for it. So one that is alone may have all
that a peer may ever have, and one that comes later waits for no longer than the next seam.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from spes_p2p.ids import PeerId

WANT_S = 30.0
"""Who still wants a place asks again within this time."""
_MAX_WANTING = 4096


def fair_share(num_places: int, num_peers: int) -> int:
    """Places that each of so many peers may hold."""
    return max(1, num_places // max(1, num_peers))


class FairPlaces:
    """Counts who holds how many, and who wants one."""

    def __init__(self, num_places: int, most_per_peer: int, now_s: Callable[[], float]) -> None:
        """`most_per_peer`: even of one that is alone."""
        self._num_places = num_places
        self._most_per_peer = most_per_peer
        self._now_s = now_s
        self._held: Counter[PeerId] = Counter()
        self._wanted_until_s: dict[PeerId, float] = {}

    def set(self, num_places: int) -> None:
        """So many from now on; who has a place keeps it."""
        self._num_places = num_places

    def take(self, peer: PeerId) -> bool:
        """Take a place for the peer; False: it gets none now."""
        held, share = self._held[peer], self._share(peer)
        if held >= self._most_per_peer or (held >= share and self._others_want(peer)):
            return False
        if self._held.total() >= self._num_places:
            if held < share:
                self._want(peer)
            return False
        self._held[peer] += 1
        self._wanted_until_s.pop(peer, None)
        return True

    def give_back(self, peer: PeerId) -> None:
        """The peer has one place less."""
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

    def must_yield(self, peer: PeerId) -> bool:
        """Whether the peer holds more than its share while others want some."""
        return self._held[peer] > self._share(peer) and self._others_want(peer)

    def _share(self, peer: PeerId) -> int:
        return fair_share(self._num_places, len({peer, *self._held, *self._wanting()}))

    def _others_want(self, peer: PeerId) -> bool:
        return any(other != peer for other in self._wanting())

    def _want(self, peer: PeerId) -> None:
        self._wanted_until_s.pop(peer, None)  # the one that asked last is the last of all
        if len(self._wanted_until_s) >= _MAX_WANTING:
            del self._wanted_until_s[next(iter(self._wanted_until_s))]
        self._wanted_until_s[peer] = self._now_s() + WANT_S

    def _wanting(self) -> dict[PeerId, float]:
        """Those whose wish has not lapsed; wishes lapse in the order in which they are kept."""
        now_s = self._now_s()
        while self._wanted_until_s and (oldest := next(iter(self._wanted_until_s.items())))[1] <= now_s:
            del self._wanted_until_s[oldest[0]]
        return self._wanted_until_s
