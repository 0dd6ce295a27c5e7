"""What a certificate is made of: the cut, the body that is hashed, and the signatures of a quorum.

Frozen msgspec structs, like everything on the wire; the other messages are in `messages.py`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from spes_p2p.ids import Digest
from spes_p2p.protocol.wire import (
    NO_DIGEST,
    Bitmap,
    Count,
    Float64,
    Hash,
    ItemKind,
    OptionalFloat64,
    Peer,
    RefusalReason,
    Run,
    Signature,
    Small,
    Wire,
)


class CutItem(Wire, frozen=True):
    """One item of a cut. An update without receipt does not appear as UPDATE but as ALIVE."""

    kind: ItemKind
    peer: Peer
    statement: Hash
    receipt: Hash
    """Of an update; NO_DIGEST otherwise."""


class Cut(Wire, frozen=True, tag="cut"):
    """What a round is made of, sorted by (kind, peer, statement)."""

    run: Run
    epoch: Count
    round: Count
    items: Annotated[tuple[CutItem, ...], Meta(max_length=4096)]


class Entry(Wire, frozen=True):
    """An item of the cut in the body. `who`: place in the previous roster, then in `newcomers`."""

    kind: ItemKind
    who: Small
    statement: Hash
    tokens: Count


class Remark(Wire, frozen=True):
    """Entry `entry` was refused, or carried over, for this reason."""

    entry: Small
    reason: RefusalReason


class Tenure(Wire, frozen=True):
    """One owner of a shard, by peer (state) or by place (delta)."""

    who: Annotated[bytes, Meta(min_length=32, max_length=32)] | Small
    begun: Count
    """Round whose certificate granted the lease."""
    last: Count
    """Round of the last accepted update for this shard by this owner; 0: none."""


class BlobShare(Wire, frozen=True):
    """A blob of a shard and the tokens behind it."""

    blob: Hash
    tokens: Count


class RosterDelta(Wire, frozen=True):
    """New values of one roster row; `gone`: the row is removed."""

    who: Small
    gone: bool
    capacity: Small
    accepted: Count
    base_round: Count
    last_item_round: Count
    voter_since: Count | None


class LeaseDelta(Wire, frozen=True):
    """New owners of one shard."""

    shard: Small
    owners: Annotated[tuple[Tenure, ...], Meta(max_length=128)]


class ShardDelta(Wire, frozen=True):
    """New blobs of one shard."""

    shard: Small
    blobs: Annotated[tuple[BlobShare, ...], Meta(max_length=128)]


class Body(Wire, frozen=True, tag="body"):
    """The hashed body of a certificate (docs/protocol.md, section 6)."""

    version: Small
    run: Run
    epoch: Count
    round: Count
    prev: Hash
    """Of a final certificate: the final one before; of a tentative one: the certificate that it builds on."""
    via: Hash
    """The tentative certificate that a final one builds on, and makes final with all before it; NO_DIGEST: none."""
    final: bool
    side: Bitmap
    """Of a tentative certificate: the voters that made it, bit i for the i-th; empty if final."""
    seed: Hash
    cut: Hash
    entries: Annotated[tuple[Entry, ...], Meta(max_length=4096)]
    newcomers: Annotated[tuple[Peer, ...], Meta(max_length=1024)]
    refused: Annotated[tuple[Remark, ...], Meta(max_length=4096)]
    carried: Annotated[tuple[Remark, ...], Meta(max_length=4096)]
    roster_root: Hash
    lease_root: Hash
    shard_root: Hash
    roster_delta: Annotated[tuple[RosterDelta, ...], Meta(max_length=4096)]
    lease_delta: Annotated[tuple[LeaseDelta, ...], Meta(max_length=4096)]
    shard_delta: Annotated[tuple[ShardDelta, ...], Meta(max_length=4096)]
    parts: Annotated[tuple[Hash, ...], Meta(max_length=4096)]
    """Digest of every part's result."""
    psi: Hash
    """BLAKE3 over `parts`."""
    kept: Bitmap
    """Parts that keep their previous value."""
    merge_alpha: OptionalFloat64
    """Empty: no merge."""
    merge_root: Hash
    """Hash of the merge lists; NO_DIGEST: no merge."""
    clip: Annotated[tuple[Float64, ...], Meta(max_length=4096)]
    """One factor for each update entry whose psi is accepted, in order; empty unless the mean clips."""
    receipts_root: Hash
    inner_steps: Count
    """H of the next round."""
    global_step: Count
    """At the start of the next round."""
    data_cursor: Count
    tokens: Count
    loss_micronats: Count
    """Token-weighted mean training loss of the accepted updates."""


def base_of(body: Body) -> Digest:
    """Hash of the certificate that a body builds on."""
    return body.prev if body.via == NO_DIGEST else body.via


class Certificate(Wire, frozen=True, tag="certificate"):
    """A body with the precommits of a quorum, and the merge lists that its root names."""

    body: Body
    view: Count
    voters: Bitmap
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=128)]
    merge_lists: Annotated[bytes, Meta(max_length=1 << 20)]
