"""What is known about a statement that is held, and what earlier rounds left for the next ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.evidence import named
from spes_p2p.protocol.messages import AckMark, Evidence, Manifest, Receipt, Signed
from spes_p2p.protocol.norms import Yardstick
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.protocol.state import ShardRow, shard_row_hash
from spes_p2p.protocol.wire import NO_DIGEST, RefusalReason

_PROOFS_KEPT = 64
"""Proven equivocators that are remembered."""


@dataclass(slots=True, kw_only=True)
class Held:
    """A statement that is held, and what is known about it."""

    signed: Signed
    hash: Digest
    held_at_ms: int
    checks: dict[int, RefusalReason | None] = field(default_factory=dict)
    """Per piece: why this peer refused it, or None if it is stored and fine."""
    asked: set[int] = field(default_factory=set)
    """Pieces that are being checked here, or were."""
    spread: set[int] = field(default_factory=set)
    """Expert pieces that are brought here without a check, by a peer that does not acknowledge."""
    acked: frozenset[int] = frozenset()
    acks: dict[PeerId, AckMark] = field(default_factory=dict)
    receipt: Receipt | None = None
    receipt_hash: Digest = NO_DIGEST
    receipt_held_at_ms: int = 0
    refused_by: dict[PeerId, RefusalReason] = field(default_factory=dict)
    manifest: Manifest | None = field(init=False)
    """The manifest, if this is an update."""

    def __post_init__(self) -> None:
        self.manifest = self.signed.body if isinstance(self.signed.body, Manifest) else None

    def take_receipt(self, receipt: Receipt, identity: Digest, now_ms: int) -> None:
        """From now on the update counts."""
        self.receipt, self.receipt_hash, self.receipt_held_at_ms = receipt, identity, now_ms


@dataclass(slots=True, kw_only=True)
class History:
    """What earlier rounds left: base rows of late updates, and the yardstick for norms."""

    rows: dict[Digest, ShardRow] = field(default_factory=dict)
    norms: Yardstick = field(default_factory=Yardstick)
    row_ages: dict[Digest, int] = field(default_factory=dict)
    proofs: dict[PeerId, Evidence] = field(default_factory=dict)
    """Evidence seen, by accused: whoever was evicted for it is evicted again when it comes back."""

    def keep_proof(self, evidence: Evidence) -> None:
        """Remember a proof, up to a number."""
        accused = named(evidence)
        if accused in self.proofs or len(self.proofs) < _PROOFS_KEPT:
            self.proofs[accused] = evidence

    def remember(self, held: Held) -> None:
        """Norms of an accepted update feed the bound of the next rounds."""
        if held.manifest is not None:
            self.norms = self.norms.extended([held.manifest])

    def enter_rows(self, rows: tuple[ShardRow, ...], round_number: int) -> None:
        """Rows of a new state; those that no late update can name any more are forgotten."""
        for row in rows:
            identity = shard_row_hash(row)
            self.rows[identity] = row
            self.row_ages[identity] = round_number
        old = [identity for identity, age in self.row_ages.items() if age < round_number - LATE_ROUNDS]
        for identity in old:
            del self.rows[identity], self.row_ages[identity]
