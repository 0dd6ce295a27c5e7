"""Rendezvous hashing: who leads, who aggregates, who wins a claim. Everybody computes the same order from the seed."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.digests import digest, digest_of_rest, hasher
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.protocol.params import MIN_ELIGIBLE


def first_seed(run: RunId) -> Digest:
    """seed_0."""
    return digest("spes seed", run)


def next_seed(run: RunId, round_number: int, seed: Digest, certificate: Digest) -> Digest:
    """seed_r = H(run, r, seed_{r-1}, hash of certificate r-1)."""
    return digest("spes seed", run, round_number, seed, certificate)


def rank(seed: Digest, purpose: str, peers: Iterable[PeerId], number: int = 0) -> tuple[PeerId, ...]:
    """Peers by H(seed, purpose, number, peer), lowest first."""
    begun = hasher(_tag(purpose), seed, number)
    return tuple(sorted(peers, key=lambda peer: (digest_of_rest(begun, peer), peer)))


def leaders(seed: Digest, voters: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """The leader of view v is the (v mod n)-th."""
    return rank(seed, "lead", voters)


def aggregators(seed: Digest, part: int, eligible: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Order in which the eligible average a part."""
    return rank(seed, "agg", eligible, part)


def claim_order(seed: Digest, shard: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Order in which claimers get a shard."""
    return rank(seed, "claim", peers, shard)


def eligible(seed: Digest, voters: Iterable[PeerId], members: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """The voters, filled up with members in rendezvous order while there are fewer than 3; sorted by peer id."""
    chosen = set(voters)
    if len(chosen) >= MIN_ELIGIBLE:
        return tuple(sorted(chosen))
    for peer in rank(seed, "fill", members):
        if len(chosen) >= MIN_ELIGIBLE:
            break
        chosen.add(peer)
    return tuple(sorted(chosen))


def claim_weight(seed: Digest, shard: int, peer: PeerId) -> Digest:
    """What `claim_order` sorts by: H(seed, shard, peer), the lowest first."""
    return _weight(seed, "claim", shard, peer)


def _weight(seed: Digest, purpose: str, number: int, peer: PeerId) -> Digest:
    return digest(_tag(purpose), seed, number, peer)


def _tag(purpose: str) -> str:
    return f"spes elect {purpose}"
