"""What goes into the round machine and what comes out of it.

Inputs are messages, results of local work and wishes of the user; effects are what the shell has to do. All entries of
a `Persist` are durable before any `Send` of the same batch leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import BlobShare, Certificate
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Piece
from spes_p2p.protocol.transition import Contribution
from spes_p2p.protocol.wire import RefusalReason

# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Bytes from an authenticated peer."""

    sender: PeerId
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The transport confirmed a `Send`."""

    ticket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReady:
    """The state after the certificate of `round` - 1 is on disk here."""

    round: int
    head: Digest | None = None
    """That certificate's hash; None: whichever is the tip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Training of `round` ended; no pieces: this peer gives nothing."""

    round: int
    tokens: int
    steps: int
    loss_micronats: int
    pieces: tuple[Piece, ...]
    base: Digest | None = None
    """`Train.base`; None: whichever certificate of `round` - 1 is on this branch."""


def nothing_trained(round_number: int, base: Digest | None = None) -> Trained:
    """A `Trained` of a peer that gives nothing in this round."""
    return Trained(round=round_number, tokens=0, steps=0, loss_micronats=0, pieces=(), base=base)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceChecked:
    """Result of `CheckPiece`; `reason` None: stored durably and well-formed."""

    manifest: Digest
    piece: int
    reason: RefusalReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeld:
    """Result of `FetchBlob`."""

    blob: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """Result of `Aggregate`: the part's value is stored (unless it was a recheck) and has this digest."""

    updates: Digest
    part: int
    digest: Digest
    recheck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Result of `RankExperts`: the merge lists of the state that a cut makes."""

    cut: Digest
    merge_lists: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingChecked:
    """Result of `CheckRanking`."""

    body: Digest
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersKnown:
    """Peers of the run that discovery found; hints only."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWanted:
    """The user wants to leave properly; the hand-over blob, if there is one."""

    handover: Digest | None
    handover_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverTaken:
    """This node, as successor, has loaded what a leaver handed over."""

    leaver: PeerId
    round: int
    handover: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverWanted:
    """The operator wants a new epoch with these members and this peer, where no quorum answers."""

    keep: tuple[PeerId, ...] | None = None
    """None: as a recovery that happens by itself would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWanted:
    """This node's training is held, or no longer: what it would not train it does not ask for."""

    held: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time."""


Input: TypeAlias = (
    Received
    | Delivered
    | StateReady
    | Trained
    | PieceChecked
    | BlobHeld
    | Aggregated
    | Ranked
    | RankingChecked
    | PeersKnown
    | LeaveWanted
    | HandoverTaken
    | RecoverWanted
    | HoldWanted
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make journal entries durable."""

    entries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send bytes to a peer; answer `Delivered(ticket)` once the transport confirms. The machine repeats it if not."""

    ticket: int
    to: PeerId
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Train `inner_steps` from the loaded state; answer `Trained`."""

    round: int
    inner_steps: int
    base: Digest | None = None
    """Hash of the certificate that the training begins from; goes back in `Trained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTraining:
    """End training now and answer `Trained` with what there is."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPiece:
    """Fetch a piece, check it, store it durably; answer `PieceChecked`."""

    manifest: Digest
    author: PeerId
    piece_index: int
    piece: Piece
    base: tuple[BlobShare, ...]
    """Blobs of the base row of an expert piece."""
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBlob:
    """Bring a blob here; answer `BlobHeld`. Asked again with more sources if it does not come."""

    blob: Digest
    max_bytes: int
    sources: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Average one part over exactly these contributions; answer `Aggregated`."""

    updates: Digest
    part: int
    previous: Digest
    contributions: tuple[Contribution, ...]
    sources: Mapping[Digest, tuple[PeerId, ...]]
    """Who may have a piece's blob, by blob id."""
    recheck: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """Compute the merge lists over these shard values (blobs per shard); answer `Ranked`."""

    cut: Digest
    shards: tuple[tuple[BlobShare, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRanking:
    """Check a leader's merge lists over these shard values; answer `RankingChecked`."""

    body: Digest
    shards: tuple[tuple[BlobShare, ...], ...]
    merge_lists: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """A certificate, final or tentative, is the tip here: store it, load its state, answer `StateReady(round + 1)`."""

    certificate: Certificate
    head: Head
    holders: tuple[PeerId, ...]
    """Who is likely to hold the blobs it names."""
    handovers: tuple[tuple[PeerId, Digest, int], ...]
    """(leaver, hand-over blob, its bytes) of the cut."""
    before: Head | None = None
    """What the certificate builds on; None: the head that was adopted before."""
    anchors: tuple[Head, ...] = ()
    """Older heads whose state may be needed again: its blobs are to be kept as those of `head`."""
    abandoned: tuple[Digest, ...] = ()
    """Tentative certificates that were on this peer's branch and are not before `head`: no longer to be served. What
    they made of this peer's own work is void: residuals become 0, masters the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The tip is an earlier certificate again, which was adopted before: load its state, answer `StateReady`."""

    head: Head
    holders: tuple[PeerId, ...]
    abandoned: tuple[Digest, ...]
    anchors: tuple[Head, ...] = ()
    """As in `Adopt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Answer a peer that is far behind with the stored certificate of this round, tentative ones of this peer's own
    chain included."""

    to: PeerId
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRefused:
    """More than f members refused this peer's update of `round` for one reason: not liars alone."""

    round: int
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A proper leave is complete: this node may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Something a person may want to know."""

    level: str
    text: str


Effect: TypeAlias = (
    Persist
    | Send
    | Train
    | StopTraining
    | CheckPiece
    | FetchBlob
    | Aggregate
    | RankExperts
    | CheckRanking
    | Adopt
    | GoBack
    | Serve
    | UpdateRefused
    | Left
    | Notify
)
