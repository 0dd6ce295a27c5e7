"""What one ballot of a round leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.ids import Digest
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.history import Held
from spes_p2p.protocol.messages import Receipt, Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """What one ballot of a round leaves to the next on the same tip."""

    tip: Digest
    statements: dict[Digest, Held]
    receipts: dict[Digest, Receipt]
    cuts: dict[Digest, Cut]
    digests: dict[Digest, Signed]

    @classmethod
    def after(cls, before: Stash | None, tip: Digest) -> Stash:
        """One that begins with what an earlier ballot left."""
        if before is None:
            return cls(tip=tip, statements={}, receipts={}, cuts={}, digests={})
        return cls(
            tip=tip,
            statements=dict(before.statements),
            receipts=dict(before.receipts),
            cuts=dict(before.cuts),
            digests=dict(before.digests),
        )
