"""Names of things, as types: what identifies a peer, a run, a round, a shard and a piece of data.

They are plain `bytes` and `int` at run time; the type checker keeps them apart.
"""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", bytes)
"""The 32 raw bytes of a peer's Ed25519 public key. `crypto.peer_text` gives libp2p's textual form of it."""

RunId = NewType("RunId", bytes)
"""32 bytes: the hash of the run manifest (certificate 0)."""

Digest = NewType("Digest", bytes)
"""32 bytes of BLAKE3. The id of a blob, or the hash of a protocol object."""

RoundNumber = NewType("RoundNumber", int)
"""Round 0 is genesis, round 1 is for claims, training begins with round 2."""

ShardId = NewType("ShardId", int)
"""Index of an expert shard, 0 <= shard < S."""
