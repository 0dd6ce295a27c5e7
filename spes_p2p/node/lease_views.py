"""Who owns what, as a user interface shows it: made once per certificate, since snapshots are made far more often."""

from __future__ import annotations

from functools import lru_cache

from spes_p2p.crypto import peer_text
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.snapshot import ShardView
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.state import bytes_of

peer_words = lru_cache(maxsize=1024)(peer_text)
"""Snapshots name the same peers again and again."""


class LeaseViews:
    """The leases of the newest head."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._of: Digest | None = None
        self._shards: tuple[ShardView, ...] = ()
        self._owned: dict[PeerId, tuple[int, ...]] = {}

    def shards(self, head: Head) -> tuple[ShardView, ...]:
        """Every shard of the run, ascending."""
        self._look(head)
        return self._shards

    def owned(self, head: Head, peer: PeerId) -> tuple[int, ...]:
        """Shards of a peer, ascending."""
        self._look(head)
        return self._owned.get(peer, ())

    def _look(self, head: Head) -> None:
        if head.hash == self._of:
            return
        shards, owned = [], dict[PeerId, list[int]]()
        for row in head.state.leases:
            owners = [PeerId(bytes_of(owner)) for owner in row.owners]
            for owner in owners:
                owned.setdefault(owner, []).append(row.shard)
            shards.append(
                ShardView(
                    shard=row.shard,
                    owners=tuple(map(peer_words, owners)),
                    mine=self._me in owners,
                    last_accepted_round=max((owner.last for owner in row.owners), default=0),
                )
            )
        self._of, self._shards = head.hash, tuple(shards)
        self._owned = {peer: tuple(numbers) for peer, numbers in owned.items()}
