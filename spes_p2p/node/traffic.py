"""How many bytes a round moves for one peer besides messages: the traffic sum, reckoned before joining. Pure.

There is no server, so what everybody downloads somebody uploads: over all peers both are equal, and per peer and round
each is, of S shards of which it owns k, n members, e eligible, R replicas (docs/protocol.md, sections 3 and 4):

    experts    (S - k) expert blobs             down: the values that others trained
    pieces     (R + 1) (n - 1) / e              down: encoded deltas of psi from every other member, of the parts that
                                                it acknowledges and averages (a member that is not eligible does not)
    results    (1 - R / e) psi in fp32          down: the averaged parts that it did not average itself, with the
                                                momentum beside them if the outer rule has one

Messages come on top: 44 KiB per peer and round with 4 members, 152 with 16, 732 with 64 (docs/protocol.md, section 10).
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.protocol.params import PieceSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Who takes part in a round, the peer in question included."""

    num_members: int
    num_eligible: int
    """Members that acknowledge and aggregate."""
    num_replicas: int
    """Equal results needed per part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTraffic:
    """Bytes that one peer moves in one round, in each direction."""

    experts_bytes: int
    pieces_bytes: int
    results_bytes: int

    @property
    def each_way_bytes(self) -> int:
        """Down, and up on the average of all peers."""
        return self.experts_bytes + self.pieces_bytes + self.results_bytes


def round_traffic(sizes: PieceSizes, crowd: Crowd, num_owned: int) -> RoundTraffic:
    """What an eligible peer that owns so many shards moves in a round in which every shard was trained."""
    psi_bytes = sizes.num_parts * sizes.psi_piece_bytes
    result_bytes = sizes.num_parts * sizes.part_result_bytes
    eligible = max(1, crowd.num_eligible)
    own_share = min(1.0, crowd.num_replicas / eligible)
    acked_share = min(1.0, (crowd.num_replicas + 1) / eligible)
    return RoundTraffic(
        experts_bytes=max(0, sizes.num_shards - num_owned) * sizes.expert_blob_bytes if crowd.num_members > 1 else 0,
        pieces_bytes=round(acked_share * (crowd.num_members - 1) * psi_bytes),
        results_bytes=round((1 - own_share) * result_bytes),
    )


def state_bytes(sizes: PieceSizes) -> int:
    """What a newcomer loads once: all experts, and psi in fp32."""
    return sizes.num_shards * sizes.expert_blob_bytes + sizes.num_parts * sizes.part_result_bytes
