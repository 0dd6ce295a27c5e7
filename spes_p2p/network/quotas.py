"""How much of this node each peer, and all peers together, may ask for: requests and bytes a second.

Each limit is a bucket that fills at its rate and holds ten seconds of it. A request takes one from the peer's bucket
and one from everybody's; bytes are charged when they have been served, so that a bucket may fall below empty: then
nothing is admitted until it has filled again. Who is refused comes back later or asks somebody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from spes_p2p.ids import PeerId

BURST_S = 10.0
"""A bucket holds what its rate gives in this time."""
_MAX_PEERS = 4096
"""Of whom buckets are remembered; the peer that has been quiet for longest is forgotten first."""

Refused = Literal["peer requests", "peer bytes", "all requests", "all bytes"]
REFUSED: tuple[Refused, ...] = ("peer requests", "peer bytes", "all requests", "all bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Rates, all above 0."""

    peer_requests_per_s: float = 20.0
    peer_bytes_per_s: float = 4_000_000.0
    all_requests_per_s: float = 500.0
    all_bytes_per_s: float = 40_000_000.0


class Bucket:
    """Fills at `rate` a second up to BURST_S of it; full at first."""

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate = rate
        self._level = rate * BURST_S
        self._at_s = now_s

    def holds(self, least: float, now_s: float) -> bool:
        """Whether there is at least so much in it now."""
        self._level = min(self._level + self._rate * (now_s - self._at_s), self._rate * BURST_S)
        self._at_s = now_s
        return self._level >= least

    def take(self, amount: float) -> None:
        """Take some out, even if there is not so much in it."""
        self._level -= amount


class Quotas:
    """Keeps the limits; without any it admits everything and only counts bytes."""

    def __init__(self, limits: QuotaLimits | None, now_s: Callable[[], float]) -> None:
        self._limits = limits
        self._now_s = now_s
        self._refused: Counter[Refused] = Counter()
        self._peers: dict[PeerId, tuple[Bucket, Bucket]] = {}
        """Peer -> (requests, bytes), the one heard last at the end."""
        self.num_admitted = 0
        self.bytes_served = 0
        if limits is not None:
            now = now_s()
            self._requests = Bucket(limits.all_requests_per_s, now)
            self._bytes = Bucket(limits.all_bytes_per_s, now)

    @property
    def refused(self) -> Mapping[Refused, int]:
        """How many requests were refused, by the limit that was reached."""
        return {reason: self._refused[reason] for reason in REFUSED}

    def admit(self, peer: PeerId) -> bool:
        """Whether a request of the peer's may be served; counts it either way."""
        reason = self._refuse(peer)
        if reason is not None:
            self._refused[reason] += 1
            return False
        self.num_admitted += 1
        return True

    def charge(self, peer: PeerId, num_bytes: int) -> None:
        """Bytes were served to a peer."""
        self.bytes_served += num_bytes
        if self._limits is not None:
            self._bytes.take(num_bytes)
            self._of(peer, self._limits)[1].take(num_bytes)

    def _refuse(self, peer: PeerId) -> Refused | None:
        if self._limits is None:
            return None
        now_s = self._now_s()
        requests, served = self._of(peer, self._limits)
        # the peer's own limits first: whoever asks too much must not use up what is everybody's
        if not requests.holds(1.0, now_s):
            return "peer requests"
        if not served.holds(0.0, now_s):
            return "peer bytes"
        if not self._requests.holds(1.0, now_s):
            return "all requests"
        if not self._bytes.holds(0.0, now_s):
            return "all bytes"
        requests.take(1.0)
        self._requests.take(1.0)
        return None

    def _of(self, peer: PeerId, limits: QuotaLimits) -> tuple[Bucket, Bucket]:
        buckets = self._peers.pop(peer, None)
        if buckets is None:
            if len(self._peers) >= _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            now_s = self._now_s()
            buckets = Bucket(limits.peer_requests_per_s, now_s), Bucket(limits.peer_bytes_per_s, now_s)
        self._peers[peer] = buckets
        return buckets
