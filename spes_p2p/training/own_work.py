"""What a peer carries from round to round besides the agreed state: the errors its codecs left over.

Published values are rounded. What the rounding took away is not lost: psi's is the residual, added to the next delta;
an expert's is the remainder, trained minus published, added to the master that the next round starts from. Both
belong to one update, and count once that update is in an adopted certificate (docs/protocol.md, section 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from spes_p2p.config import RunConfig
from spes_p2p.errors import SchemaError
from spes_p2p.training.arrays import F32, Tensors
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.pieces import zero_residual

MasterRule: TypeAlias = Literal["start", "carry", "keep"]
"""Where an owned shard's fp32 master comes from: the agreed start; the start and what rounding took from the update
that was accepted; or the master as trained (docs/protocol.md, section 7)."""
ResidualRule: TypeAlias = Literal["advance", "keep", "zero"]
"""What becomes of psi's residual; see `OwnWork.settle`."""
MAX_PENDING = 3
"""Updates whose fate may still be open: a psi delta is accepted at most two rounds late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpdate:
    """One published update whose certificate is not known yet."""

    wanted: F32
    """Flat [values of psi]: delta plus the residual before, which is what the pieces stand for."""
    left_over: F32
    """Flat [values of psi]: `wanted` minus what the pieces decode to."""
    remainders: Mapping[int, Tensors]
    """Shard -> trained minus published, by tensor name."""


@dataclass(slots=True)
class OwnWork:
    """The residual that is current, and the updates that are under way. Changed by its methods only."""

    config: RunConfig
    residual: F32 = field(init=False)
    pending: dict[int, PendingUpdate] = field(default_factory=dict)
    """Round -> update."""

    def __post_init__(self) -> None:
        self.residual = zero_residual(self.config)

    def published(self, round_number: int, update: PendingUpdate) -> None:
        """Note an update of this round. The oldest is forgotten when there are more than three."""
        size = self.residual.shape
        if update.wanted.shape != size or update.left_over.shape != size:
            raise SchemaError(f"an update of {update.wanted.shape} values for a psi of {size}")
        self.pending[round_number] = update
        for old in sorted(self.pending)[:-MAX_PENDING]:
            del self.pending[old]

    def remainder(self, round_number: int | None, shard: int) -> Tensors | None:
        """Trained minus published of a shard in one update; None if that update or shard is unknown here."""
        update = self.pending.get(round_number) if round_number is not None else None
        return dict(update.remainders[shard]) if update and shard in update.remainders else None

    def settle(self, rule: ResidualRule, round_number: int | None, kept_parts: Sequence[int] = ()) -> None:
        """Apply what a certificate said.

        `advance`: the update of that round is in it, so what it left over is current; for a part that the certificate
        kept at its previous value nothing was taken, so the whole delta is. `keep`: nothing of this peer is in it.
        `zero`: the branch is lost, and with it every update under way. An update that is unknown here (its checkpoint
        was lost) leaves no residual.
        """
        if rule == "keep":
            return
        if rule == "zero":
            self.residual = zero_residual(self.config)
            self.pending.clear()
            return
        update = self.pending.get(round_number) if round_number is not None else None
        if update is None:
            self.residual = zero_residual(self.config)
            return
        layout = psi_layout(self.config)
        current = update.left_over.copy()
        for part in kept_parts:
            where = layout.part_slice(part)
            current[where] = update.wanted[where]
        self.residual = current
        for old in [number for number in self.pending if round_number is not None and number <= round_number]:
            del self.pending[old]


def carried_master(start: Mapping[str, F32], remainder: Mapping[str, F32]) -> Tensors:
    """start + (trained - published), by tensor name. Raises SchemaError if the names or shapes differ."""
    if start.keys() != remainder.keys() or any(start[name].shape != remainder[name].shape for name in start):
        raise SchemaError("a shard's remainder does not fit its start")
    return {name: np.add(values, remainder[name], dtype=np.float32) for name, values in start.items()}
