"""What peers did wrong lately: the basis for not listening to some and for asking others first. And the traffic."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from spes_p2p.crypto import peer_text
from spes_p2p.ids import Digest, PeerId
from spes_p2p.network.pacing import Gate

MAX_OFFENCES = 20
WINDOW_S = 60.0
_MAX_PEERS = 4096

logger = logging.getLogger(__name__)


class Offences:
    """Counts each peer's offences of the last minute."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._at_s: dict[PeerId, deque[float]] = {}

    def add(self, peer: PeerId, reason: str) -> None:
        """Note one, and say so in the log."""
        logger.warning("peer %s: %s", peer_text(peer), reason)
        if peer not in self._at_s and len(self._at_s) >= _MAX_PEERS:
            del self._at_s[next(iter(self._at_s))]
        self._at_s.setdefault(peer, deque(maxlen=MAX_OFFENCES)).append(self._now_s())

    def count(self, peer: PeerId) -> int:
        """Offences within the last minute, at most MAX_OFFENCES."""
        times = self._at_s.get(peer)
        if times is None:
            return 0
        while times and times[0] < self._now_s() - WINDOW_S:
            times.popleft()
        if not times:
            del self._at_s[peer]
        return len(times)

    def is_shunned(self, peer: PeerId) -> bool:
        """Whether a peer did so much wrong that it is not heard for a while."""
        return self.count(peer) >= MAX_OFFENCES


class Traffic:
    """Payload bytes of messages and blobs since the start, and the gates that they pass."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.up = Gate()
        self.down = Gate()
        self.no_blobs = ""
        """Why this node neither serves nor fetches blobs; empty: it does."""
        self.spared: frozenset[Digest] = frozenset()
        """Blobs that are served all the same."""

    def withholds(self, blob: Digest) -> bool:
        """Whether a blob is not served."""
        return bool(self.no_blobs) and blob not in self.spared
