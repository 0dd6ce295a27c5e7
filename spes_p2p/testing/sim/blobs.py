"""Blobs of a simulated swarm: names with holders, that take time by size and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.params import PieceSizes
from spes_p2p.testing.sim.peer import Flight, SimPeer

if TYPE_CHECKING:
    from spes_p2p.testing.swarm import Swarm

RETRY_MS = 500
"""Before a state is asked for again."""


class Blobs:
    """Transfers between the peers of a swarm. A peer's blobs are on its disk: a crash loses none."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    def sources(self, peer: PeerId, blob: Digest, among: Iterable[PeerId]) -> Iterator[SimPeer]:
        """Those of them that have a blob, run, serve it, and can be reached both ways."""
        swarm = self._swarm
        for other_id in among:
            if other_id == peer or swarm.is_blocked(other_id, peer) or swarm.is_blocked(peer, other_id):
                continue
            for other in swarm.instances(other_id):
                if other.runs and not other.withholds and blob in other.blobs:
                    yield other

    def fetch(
        self,
        peer: SimPeer,
        blob: Digest,
        num_bytes: int,
        sources: tuple[PeerId, ...],
        ended: Callable[[bool], None],
    ) -> None:
        """Bring a blob here; `ended(whether it came)` is called if the process still lives.

        It comes from the source that is quickest. Asked again while it is on its way, it is not sent a second time,
        but if another source would be quicker now.
        """
        swarm, now_ms = self._swarm, self._swarm.now_ms
        if blob in peer.blobs:
            swarm.after(peer, peer.line.transfer_ms, lambda: ended(True))
            return
        source = self._quickest(self.sources(peer.peer_id, blob, sources), num_bytes)
        flying = peer.fetching.get(blob)
        if source is None and flying is None:
            swarm.after(peer, 10 * peer.line.transfer_ms, lambda: ended(False))
            return
        if flying is not None:
            flying.ended.append(ended)
            if source is None or self._free_ms(source, num_bytes) >= flying.due_ms - peer.line.transfer_ms:
                return
        else:
            peer.fetching[blob] = flying = Flight(due_ms=now_ms, ended=[ended])
        if source is not None:
            flying.due_ms = now_ms + self._transfer_ms(source, peer, num_bytes)
            swarm.after(peer, flying.due_ms - now_ms, partial(self._arrive, peer, source, blob, sources))

    def _arrive(self, peer: SimPeer, source: SimPeer, blob: Digest, others: tuple[PeerId, ...]) -> None:
        flight = peer.fetching.pop(blob, None)
        if flight is None:
            return  # another source was quicker
        came = blob in peer.blobs or any(self.sources(peer.peer_id, blob, (source.peer_id, *others)))
        if came:
            peer.blobs.add(blob)
        for ended in flight.ended:
            ended(came)

    def _quickest(self, sources: Iterable[SimPeer], num_bytes: int) -> SimPeer | None:
        """The first of those that have sent it soonest. Nothing is sooner than now: the search ends there, which in a
        large swarm is nearly always at the first."""
        best, best_ms = None, 0
        for source in sources:
            free_ms = self._free_ms(source, num_bytes)
            if best is None or free_ms < best_ms:
                best, best_ms = source, free_ms
            if best_ms == self._swarm.now_ms:
                break
        return best

    def _free_ms(self, source: SimPeer, num_bytes: int) -> int:
        return max(self._swarm.now_ms, source.uplink_free_ms) + source.line.bytes_ms(num_bytes)

    def _transfer_ms(self, source: SimPeer, peer: SimPeer, num_bytes: int) -> int:
        """Transfers of one line follow each other; a slow source takes no more of a fast receiver than its bytes."""
        now_ms = self._swarm.now_ms
        source.uplink_free_ms = self._free_ms(source, num_bytes)
        peer.downlink_free_ms = max(now_ms, peer.downlink_free_ms) + peer.line.bytes_ms(num_bytes)
        return peer.line.transfer_ms + max(source.uplink_free_ms, peer.downlink_free_ms) - now_ms

    def load(self, peer: SimPeer, head: Head, holders: tuple[PeerId, ...], ready: Callable[[], None]) -> None:
        """Fetch what a state lacks, again and again, until it is all here or a newer state took over."""
        lacking = {blob: size for blob, size in state_blobs(head).items() if blob not in peer.blobs}
        if not lacking:
            self._swarm.after(peer, peer.line.transfer_ms, ready)
            return
        outstanding = set(lacking)

        def ended(blob: Digest, came: bool) -> None:
            outstanding.discard(blob)
            if not outstanding and peer.heads[-1] is head:
                delay_ms = 0 if came else RETRY_MS
                self._swarm.after(peer, delay_ms, lambda: self.load(peer, head, holders, ready))

        sources = tuple(dict.fromkeys((*holders, *head.state.members, *self._swarm.peers)))
        for blob, size in sorted(lacking.items()):
            self.fetch(peer, blob, size, sources, partial(ended, blob))

    def fetch_all(
        self, peer: SimPeer, wanted: Mapping[Digest, tuple[int, tuple[PeerId, ...]]], ended: Callable[[bool], None]
    ) -> None:
        """Bring several blobs here; `ended(whether all came)`."""
        outstanding, failed = set(wanted), set()

        def one(blob: Digest, came: bool) -> None:
            outstanding.discard(blob)
            if not came:
                failed.add(blob)
            if not outstanding:
                ended(not failed)

        for blob, (size, sources) in sorted(wanted.items()):
            self.fetch(peer, blob, size, sources, partial(one, blob))


def state_blobs(head: Head) -> dict[Digest, int]:
    """Every blob of a state, with its size."""
    sizes: PieceSizes = head.run.sizes
    found = dict.fromkeys(head.parts, sizes.part_result_bytes)
    found.update({share.blob: sizes.expert_blob_bytes for row in head.state.shards for share in row.blobs})
    return found
