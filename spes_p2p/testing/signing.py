"""Fast signatures for simulations: keyed BLAKE3 instead of Ed25519, which takes most of a simulated swarm's time.

A peer's secret follows from its peer id, so that the verifier knows all of them. Whoever holds a peer id could sign
for it: a simulated liar signs with its own `FastSigner` only. The real pair is `crypto.Identity` and `crypto.verify`;
`tests/contract/test_signing.py` says what both promise.
"""

from __future__ import annotations

import functools

from blake3 import blake3

from spes_p2p.crypto import KEY_BYTES, SIGNATURE_BYTES, signed_bytes
from spes_p2p.digests import digest
from spes_p2p.ids import PeerId


@functools.lru_cache(maxsize=4096)
def _secret(peer: PeerId) -> bytes:
    return digest("testing secret", peer)


def _signature(peer: PeerId, tag: str, payload: bytes) -> bytes:
    return blake3(signed_bytes(tag, payload), key=_secret(peer)).digest(length=SIGNATURE_BYTES)


class FastSigner:
    """Signs as one peer. Satisfies `ports.Signer`. Raises ValueError for a peer id that has not 32 bytes."""

    def __init__(self, peer_id: PeerId) -> None:
        if len(peer_id) != KEY_BYTES:
            raise ValueError(f"a peer id of {len(peer_id)} bytes")
        self._peer_id = peer_id

    @classmethod
    def from_seed(cls, seed: bytes) -> FastSigner:
        """The signer of a seed of any length."""
        return cls(PeerId(digest("testing peer", seed)))

    @property
    def peer_id(self) -> PeerId:
        """Who signs."""
        return self._peer_id

    def sign(self, tag: str, payload: bytes) -> bytes:
        """64 bytes over (tag, payload)."""
        return _signature(self._peer_id, tag, payload)


def verify_fast(peer: PeerId, tag: str, payload: bytes, signature: bytes) -> bool:
    """Whether `signature` is the peer's `FastSigner`'s over (tag, payload). Satisfies `ports.Verifier`."""
    return len(peer) == KEY_BYTES and signature == _signature(peer, tag, payload)
