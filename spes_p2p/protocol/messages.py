"""Every message of the wire and every object that is hashed, as frozen msgspec structs.

They travel as msgpack arrays (`codec.py`), a tag first where a union must be told apart. The types bound all sizes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from spes_p2p.protocol.body import Body, Certificate, Cut
from spes_p2p.protocol.wire import (
    NO_DIGEST,
    Bitmap,
    Branch,
    Count,
    Float64,
    Hash,
    OptionalSignature,
    Peer,
    PieceKind,
    RefKind,
    RefusalReason,
    Run,
    Signature,
    Small,
    Step,
    Wire,
)

# --- the run ---------------------------------------------------------------------------------------------------------


class RunManifest(Wire, frozen=True, tag="run"):
    """Certificate 0: what the operator signs. Its hash is the run id."""

    version: Small
    config: Annotated[bytes, Meta(max_length=1 << 16)]
    """`RunConfig.to_json()`."""
    created_by: Peer
    founders: Annotated[tuple[Peer, ...], Meta(min_length=1, max_length=128)]
    """Sorted by peer id."""
    invite_key: Annotated[bytes, Meta(max_length=32)]
    """Public half of the invite key; empty unless admission is `invited`."""
    recovery_key: Peer
    parts: Annotated[tuple[Hash, ...], Meta(max_length=4096)]
    """Part results of the genesis psi."""
    shards: Annotated[tuple[Hash, ...], Meta(max_length=4096)]
    """Genesis blob of each shard."""
    held_out: Hash
    held_out_bytes: Count


class SignedRun(Wire, frozen=True, tag="signed-run"):
    """The run manifest with its creator's signature."""

    manifest: RunManifest
    signature: Signature


# --- signed statements of members (items of a cut) -------------------------------------------------------------------


class Piece(Wire, frozen=True):
    """One blob of an update."""

    kind: PieceKind
    index: Small
    """Part, or shard."""
    blob: Hash
    size_bytes: Count
    codec: Small
    base_row: Hash
    """Part result, or hash of the shard row, that the training began from."""
    squared_norm: Float64
    """Of the decoded delta."""


class Manifest(Wire, frozen=True, tag="manifest"):
    """An update: what a peer trained from certificate `round` - 1."""

    tag: ClassVar[str] = "manifest"
    run: Run
    epoch: Count
    round: Count
    prev: Hash
    """Hash of certificate `round` - 1: a fencing token."""
    tokens: Count
    steps: Count
    loss_micronats: Count
    pieces: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=8192)]


class Alive(Wire, frozen=True, tag="alive"):
    """A sign of life; `more`: an update of this round will follow."""

    tag: ClassVar[str] = "alive"
    run: Run
    epoch: Count
    round: Count
    more: bool


class Join(Wire, frozen=True, tag="join"):
    """Asks to become a member; valid for the round it names and the next two."""

    tag: ClassVar[str] = "join"
    run: Run
    epoch: Count
    round: Count
    capacity: Small
    """Most shards to own."""
    invite_signature: OptionalSignature
    """By the invite key over (run, peer), tag `invite`."""
    sponsor: Annotated[bytes, Meta(max_length=32)]
    """A founder, in runs with an allowlist."""
    sponsor_signature: OptionalSignature
    """By the sponsor over (run, peer), tag `allow`."""


class Leave(Wire, frozen=True, tag="leave"):
    """Leaves; the shards are handed over in a blob, or not."""

    tag: ClassVar[str] = "leave"
    run: Run
    epoch: Count
    round: Count
    handover: Hash
    """NO_DIGEST: none."""
    handover_bytes: Count


class Claim(Wire, frozen=True, tag="claim"):
    """Asks for a shard, and states the capacity from now on."""

    tag: ClassVar[str] = "claim"
    run: Run
    epoch: Count
    round: Count
    capacity: Small


class Evidence(Wire, frozen=True, tag="evidence"):
    """Two statements of one peer for one slot: canonical bytes of two `Signed`."""

    tag: ClassVar[str] = "evidence"
    run: Run
    epoch: Count
    round: Count
    first: Annotated[bytes, Meta(max_length=1 << 20)]
    second: Annotated[bytes, Meta(max_length=1 << 20)]


# --- other signed bodies ---------------------------------------------------------------------------------------------


class Ack(Wire, frozen=True, tag="ack"):
    """These pieces of the manifest are stored durably here and are well-formed."""

    tag: ClassVar[str] = "ack"
    run: Run
    epoch: Count
    round: Count
    manifest: Hash
    pieces: Bitmap


class Refusal(Wire, frozen=True, tag="refusal"):
    """This piece was refused."""

    tag: ClassVar[str] = "refusal"
    run: Run
    epoch: Count
    round: Count
    manifest: Hash
    piece: Small
    reason: RefusalReason


class CutAnnouncement(Wire, frozen=True, tag="cut-by"):
    """The leader of a view names its cut. View and signature stand outside the cut's hash."""

    tag: ClassVar[str] = "cut-by"
    run: Run
    epoch: Count
    round: Count
    """Of this and the other messages of a ballot: the height, or the round of a tentative attempt."""
    view: Count
    cut: Hash
    branch: Branch = b""
    """Of this and the other messages of a ballot: empty, or the name of the tentative attempt (`branch_of`)."""


class PartDigest(Wire, frozen=True, tag="part"):
    """An aggregator's result for one part over exactly these updates."""

    tag: ClassVar[str] = "part"
    run: Run
    epoch: Count
    round: Count
    part: Small
    updates: Hash
    """Hash of the cut's update items."""
    digest: Hash


class QuorumCertificate(Wire, frozen=True):
    """q prevotes for one body in one view, of which f + 1 say *held*. Bit i of a bitmap: voter i by peer id."""

    view: Count
    body: Hash
    voters: Bitmap
    held: Bitmap
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=128)]


class Proposal(Wire, frozen=True, tag="proposal"):
    """The leader of a view proposes a body; from view 1 on with the quorum certificate it builds on, if any."""

    tag: ClassVar[str] = "proposal"
    run: Run
    epoch: Count
    round: Count
    view: Count
    body: Hash
    qc: QuorumCertificate | None
    branch: Branch = b""


class Vote(Wire, frozen=True, tag="vote"):
    """A prevote or precommit. `held`: this voter has every blob the body names (prevotes only)."""

    tag: ClassVar[str] = "vote"
    run: Run
    epoch: Count
    round: Count
    view: Count
    step: Step
    body: Hash
    """NO_DIGEST: nil."""
    held: bool
    branch: Branch = b""


class ViewChange(Wire, frozen=True, tag="view"):
    """Asks for a view, with the highest quorum certificate known."""

    tag: ClassVar[str] = "view"
    run: Run
    epoch: Count
    round: Count
    view: Count
    qc: QuorumCertificate | None
    branch: Branch = b""


class Side(Wire, frozen=True, tag="side"):
    """Which voters its author hears while others are silent, and whom it goes on with."""

    tag: ClassVar[str] = "side"
    run: Run
    epoch: Count
    round: Count
    height: Count
    """Round after the author's last final certificate: the bitmaps are over its voters."""
    tip: Hash
    """The certificate that the author builds on."""
    heard: Bitmap
    side: Bitmap
    """The voters of the author's tentative attempt; empty: it takes part in the final voting."""
    asks: bool
    """Answered with the receiver's own."""


Statement: TypeAlias = Manifest | Alive | Join | Leave | Claim | Evidence
SignedBody: TypeAlias = (
    Manifest
    | Alive
    | Join
    | Leave
    | Claim
    | Evidence
    | Ack
    | Refusal
    | CutAnnouncement
    | PartDigest
    | Proposal
    | Vote
    | ViewChange
    | Side
)


class Signed(Wire, frozen=True, tag="signed"):
    """A body with its author's signature over (tag of the body, canonical bytes of the body)."""

    peer: Peer
    body: SignedBody
    signature: Signature


# --- messages that are authenticated by the transport alone ----------------------------------------------------------


class AckMark(Wire, frozen=True):
    """What is left of an `Ack` whose manifest is known."""

    peer: Peer
    pieces: Bitmap
    signature: Signature


class Receipt(Wire, frozen=True, tag="receipt"):
    """Acks for every piece of an update of `round`."""

    round: Count
    manifest: Hash
    acks: Annotated[tuple[AckMark, ...], Meta(max_length=128)]


class CutMessage(Wire, frozen=True, tag="cut-msg"):
    """A cut and the leader's signature on it."""

    announcement: Signed
    cut: Cut


class ProposalMessage(Wire, frozen=True, tag="proposal-msg"):
    """A proposal with its body and merge lists."""

    proposal: Signed
    body: Body
    merge_lists: Annotated[bytes, Meta(max_length=1 << 20)]


class BodyMessage(Wire, frozen=True, tag="body-msg"):
    """A body with its merge lists, for a peer that asked, and for the journal."""

    body: Body
    merge_lists: Annotated[bytes, Meta(max_length=1 << 20)]


class Ref(Wire, frozen=True):
    """Points to an object. `about`: the manifest of a receipt; NO_DIGEST otherwise."""

    kind: RefKind
    hash: Hash
    about: Hash


class Offer(Wire, frozen=True, tag="offer"):
    """The sender holds these objects of the open round."""

    epoch: Count
    round: Count
    refs: Annotated[tuple[Ref, ...], Meta(max_length=4096)]


class Want(Wire, frozen=True, tag="want"):
    """Asks for objects of the open round."""

    epoch: Count
    round: Count
    refs: Annotated[tuple[Ref, ...], Meta(max_length=4096)]


class TipAsk(Wire, frozen=True, tag="tip"):
    """The sender is in this round: answered with its certificate or, while it is open, with what is known."""

    epoch: Count
    round: Count
    final_round: Count = 0
    """Of the sender's last final certificate."""
    tip: Hash = NO_DIGEST
    """The certificate that the sender builds on; NO_DIGEST: whichever the receiver has of `round` - 1."""


class Decided(Wire, frozen=True, tag="decided"):
    """The sender has the certificate of this round."""

    epoch: Count
    round: Count
    certificate: Hash
    """NO_DIGEST: the sender would have to look it up."""


class HalfIn(Wire, frozen=True, tag="half"):
    """The sender holds manifests of this round of half of the members."""

    epoch: Count
    round: Count


class SeenView(Wire, frozen=True):
    """What a voter has of one view: two bytes of each signature, per voter by peer id; zeros, or empty: nothing."""

    view: Count
    proposal: Annotated[bytes, Meta(max_length=2)]
    prevotes: Annotated[bytes, Meta(max_length=256)]
    precommits: Annotated[bytes, Meta(max_length=256)]


class Seen(Wire, frozen=True, tag="seen"):
    """Asks a voter for the votes, proposals and view changes that the sender lacks."""

    epoch: Count
    round: Count
    wishes: Annotated[tuple[Count, ...], Meta(max_length=128)]
    """Highest view that each voter, by peer id, has asked for; 0: none."""
    views: Annotated[tuple[SeenView, ...], Meta(max_length=64)]
    branch: Branch = b""


class HandoverDone(Wire, frozen=True, tag="handover"):
    """The successor has what the leaver handed over."""

    round: Count
    handover: Hash


Message: TypeAlias = (
    Signed
    | Receipt
    | CutMessage
    | ProposalMessage
    | BodyMessage
    | Cut
    | Certificate
    | Offer
    | Want
    | TipAsk
    | Decided
    | HalfIn
    | Seen
    | HandoverDone
    | SignedRun
)
