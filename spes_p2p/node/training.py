"""The node's training: brings its trainer process from certificate to certificate, and its updates into the store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from spes_p2p.config import RunConfig
from spes_p2p.errors import NotFiniteError, TrainerError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.settle import Since, settle, start_spec
from spes_p2p.node.sizes import EXPERT_CODECS, PSI_CODECS
from spes_p2p.node.worker_messages import (
    HandoverExported,
    HandoverImported,
    LoadStart,
    Published,
    Started,
    Trained,
)
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import pack_float
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Piece
from spes_p2p.protocol.state import shard_row_hash
from spes_p2p.protocol.wire import PieceKind
from spes_p2p.storage.ledger import Ledger

_META_KEY = "own expert blobs"
_UPDATES_KEPT = 4
_MAX_FULL_EVALUATION_BYTES = 256 * 1024
"""Held-out sets up to this size are evaluated whole every round, larger ones in part."""
_PART_EVALUATION_BYTES = 64 * 1024


class Requests(Protocol):
    """What is asked of the trainer process: `worker.Worker`. Every method raises TrainerError."""

    async def load_start(self, request: LoadStart) -> Started:
        """Load the start of a round. Raises BlobError if the store lacks a blob."""
        ...

    async def train(self, num_inner_steps: int) -> Trained:
        """Make inner steps."""
        ...

    def stop_training(self) -> None:
        """Have the `train` that is being awaited end early."""
        ...

    async def publish(self) -> Published:
        """Store the update. Raises NotFiniteError if it is withheld."""
        ...

    async def export_handover(self, shard: int) -> HandoverExported:
        """Store masters and moments of an owned shard."""
        ...

    async def import_handover(self, shard: int, blob: Digest) -> HandoverImported:
        """Take over a shard."""
        ...


class Training:
    """One peer's trainer over the rounds. Loads and trainings are asked for one after the
    other; a load waits for the end of an export."""

    def __init__(
        self,
        config: RunConfig,
        peer: PeerId,
        worker: Requests,
        ledger: Ledger,
        held_out_bytes: int,
        notify: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._peer = peer
        self._worker = worker
        self._ledger = ledger
        self._notify = notify
        whole = held_out_bytes <= _MAX_FULL_EVALUATION_BYTES
        self._evaluate_bytes = None if whole else _PART_EVALUATION_BYTES
        self._loaded: Head | None = None
        self._keeps_start = asyncio.Lock()
        """Held while another start is loaded, and while all shards of this one are exported."""
        stored = ledger.get_meta(_META_KEY)
        self._published: dict[int, set[Digest]] = (
            msgspec.msgpack.decode(stored, type=dict[int, set[Digest]]) if stored else {}
        )

    @property
    def loaded(self) -> Head | None:
        """The head whose start the trainer has loaded."""
        return self._loaded

    @property
    def owned(self) -> tuple[int, ...]:
        """Shards of this peer in the round that the trainer has loaded."""
        return self._loaded.state.shards_of(self._peer) if self._loaded is not None else ()

    async def load(self, head: Head, certificate: Certificate | None, so_far: Since | None) -> float | None:
        """Load the start of the round after `head`; its blobs are in the store. Returns the held-out loss, nats per
        byte, if there is a held-out set.

        `so_far`: what happened since the head that is loaded, or that the trainer's checkpoint belongs to; None: the
        trainer has nothing of its own. Raises TrainerError, BlobError, MachineError.
        """
        async with self._keeps_start:
            rules = settle(so_far, head, self._peer, self._published)
            started = await self._worker.load_start(
                LoadStart(
                    spec=start_spec(head, certificate.merge_lists if certificate is not None else b""),
                    owned=rules.owned,
                    masters=dict(rules.masters),
                    residual=rules.residual,
                    accepted_update=rules.accepted_update,
                    kept_parts=rules.kept_parts,
                    evaluate_bytes=self._evaluate_bytes,
                )
            )
            self._loaded = head
            self._pass_on(started.notices)
        return started.nats_per_byte

    async def train(self, order: fx.Train) -> fx.Trained:
        """Train the loaded round and put the update into the store. No pieces: there is nothing to give."""
        nothing = fx.nothing_trained(order.round, order.base)
        loaded = self._loaded
        if loaded is None or loaded.round != order.round - 1 or order.base not in (None, loaded.hash):
            return nothing
        try:
            result = await self._worker.train(order.inner_steps)
            self._pass_on(result.notices)
            if result.num_skipped:
                self._notify("warning", f"round {order.round}: {result.num_skipped} steps were skipped (not finite)")
            if result.num_steps == 0:
                return nothing
            published = await self._worker.publish()
        except (TrainerError, NotFiniteError) as error:
            self._notify("error", f"round {order.round} gives no update: {error}")
            return nothing
        self._remember(published)
        loss = published.mean_loss if math.isfinite(published.mean_loss) else 0.0
        return fx.Trained(
            round=order.round,
            tokens=published.tokens,
            steps=published.num_steps,
            loss_micronats=max(0, round(loss * 1e6)),
            pieces=self._pieces(loaded, published),
            base=order.base,
        )

    def stop(self) -> None:
        """End the training that is under way after its present step."""
        self._worker.stop_training()

    def _pass_on(self, notices: tuple[str, ...]) -> None:
        for notice in notices:
            self._notify("warning", notice)

    def _remember(self, published: Published) -> None:
        self._published[published.round] = {piece.blob for piece in published.experts}
        for old in sorted(self._published)[:-_UPDATES_KEPT]:
            del self._published[old]
        self._ledger.set_meta(_META_KEY, msgspec.msgpack.encode(self._published))

    def _pieces(self, head: Head, published: Published) -> tuple[Piece, ...]:
        psi = (
            Piece(
                PieceKind.PSI,
                piece.index,
                piece.blob,
                piece.size_bytes,
                PSI_CODECS[self._config.codecs.psi],
                head.parts[piece.index],
                pack_float(piece.squared_norm),
            )
            for piece in published.psi
        )
        experts = (
            Piece(
                PieceKind.EXPERT,
                piece.index,
                piece.blob,
                piece.size_bytes,
                EXPERT_CODECS[self._config.codecs.expert],
                shard_row_hash(head.state.shards[piece.index]),
                pack_float(piece.squared_norm),
            )
            for piece in published.experts
        )
        return (*psi, *experts)

    # --- hand-over ---------------------------------------------------------------------------------------------------

    async def export(self) -> dict[int, tuple[Digest, int]]:
        """Masters and moments of all shards owned in the loaded round, as blobs: shard -> (blob, bytes). Raises
        TrainerError.

        All of one round: with a load after each, leases would lapse shard by shard before they are packed.
        """
        async with self._keeps_start:
            found = {}
            for shard in self.owned:
                exported = await self._worker.export_handover(shard)
                found[shard] = (exported.blob, exported.size_bytes)
            return found

    async def take_over(self, shard: int, blob: Digest) -> None:
        """Go on with a leaver's masters and moments; what does not fit is refused and the table's value stays."""
        imported = await self._worker.import_handover(shard, blob)
        if imported.refused:
            self._notify("warning", f"the hand-over of shard {shard} was refused: {imported.refused}")
        else:
            self._notify("info", f"took over shard {shard} with its optimizer state")
