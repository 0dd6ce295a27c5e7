"""What one peer wants of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.ports import Signer
from spes_p2p.protocol.head import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What this peer wants of the run."""

    capacity: int
    """Most shards to own."""
    private_seed: bytes
    """Known to nobody else: draws the part that this voter recomputes."""
    invite_signature: bytes = b""
    sponsor: bytes = b""
    sponsor_signature: bytes = b""
    stop_after_round: int | None = None
    """Train no more once this round is certified; serve on."""
    recovery: Signer | None = None
    """The run's recovery key, if this peer holds it."""
    held: bool = False
    """Training is held: this peer keeps what it owns for as long as the leases last, and wants no more."""

    @property
    def room(self) -> int:
        """The capacity to state. Leases that are held do not depend on it."""
        return 0 if self.held else self.capacity

    def holding(self, held: bool) -> Wishes:
        """The same with training held, or not."""
        return replace(self, held=held)

    def finished(self, head: Head) -> bool:
        """Whether this peer has trained as many rounds as it wanted."""
        return self.stop_after_round is not None and head.round >= self.stop_after_round
