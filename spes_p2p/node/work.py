"""The node's own arithmetic: checking pieces, averaging parts, ranking experts. Runs in threads, on blobs of the store.

Bits must agree between machines, so everything is numpy with the rules of `training.aggregate`; the threads refuse to
start in a process that flushes denormals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from typing import TypeVar

from spes_p2p.config import RunConfig
from spes_p2p.digests import blob_id
from spes_p2p.errors import BlobError, MachineError, SchemaError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.node.sizes import EXPERT_CODECS, PSI_CODECS, expert_blob_bytes, psi_piece_bytes
from spes_p2p.ports import BlobStore
from spes_p2p.protocol.body import BlobShare
from spes_p2p.protocol.codec import unpack_float
from spes_p2p.protocol.effects import Aggregate
from spes_p2p.protocol.messages import Piece
from spes_p2p.protocol.wire import PieceKind, RefusalReason
from spes_p2p.training.checks import check_expert_blob, check_psi_piece
from spes_p2p.training.pieces import PieceOfCut, aggregate_part
from spes_p2p.training.selftest import self_test
from spes_p2p.training.similarity import encode_lists, lists_problem, merge_lists
from spes_p2p.training.start import StartReader, StartSpec

_THREADS = 2
"""One for what is urgent while another averages; more would take the trainer's cores."""

Result = TypeVar("Result")
Rows = tuple[tuple[BlobShare, ...], ...]


class Work:
    """Arithmetic on the blobs of one run."""

    def __init__(self, config: RunConfig, blobs: BlobStore) -> None:
        self._config = config
        self._blobs = blobs
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="work", initializer=self_test)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run something in one of the threads. Raises MachineError if they compute other bits than other peers."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except BrokenExecutor as error:
            self_test()  # says what is wrong, if it is wrong in this thread too
            raise MachineError("the arithmetic threads failed their self-test; the log says why") from error

    def close(self) -> None:
        """End the threads once what they do is done."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def refuse_unseen(self, piece: Piece) -> RefusalReason | None:
        """Reason to refuse a piece by what its manifest says of it, before a byte is fetched."""
        config = self._config
        if piece.kind is PieceKind.PSI:
            fits = (PSI_CODECS[config.codecs.psi], psi_piece_bytes(config, piece.index))
        else:
            fits = (EXPERT_CODECS[config.codecs.expert], expert_blob_bytes(config, piece.index))
        return None if (piece.codec, piece.size_bytes) == fits else RefusalReason.SCHEMA

    def check_piece(self, piece: Piece, base: tuple[BlobShare, ...], parts: tuple[Digest, ...]) -> RefusalReason | None:
        """Reason to refuse a piece that is in the store, or None. `base`: blobs of an expert's base row."""
        data, norm = self._blobs.read(piece.blob), unpack_float(piece.squared_norm)
        if piece.kind is PieceKind.PSI:
            problem = check_psi_piece(self._config, piece.index, data, norm)
        else:
            # only the row in question is read, so it may stand for all of them
            rows = tuple(base for _ in range(self._config.num_shards))
            reader = self._reader(parts, rows)
            try:
                problem = check_expert_blob(self._config, piece.index, data, reader.row_tensor, norm)
            except (BlobError, SchemaError):
                return RefusalReason.MISSING  # the base row is missing or damaged here: no fault of the piece's author
        return None if problem is None else RefusalReason(int(problem))

    def aggregate(self, effect: Aggregate) -> Digest:
        """Average a part over pieces that are in the store; the result is stored unless this is a recheck.

        Raises BlobError for a missing piece, NotFiniteError if the mean is not finite.
        """
        pieces = [
            PieceOfCut(
                peer=contribution.peer,
                data=self._blobs.read(contribution.pieces[effect.part].blob),
                weight=contribution.weight,
                clip=contribution.clip,
            )
            for contribution in effect.contributions
        ]
        value = aggregate_part(self._config, effect.part, self._blobs.read(effect.previous), pieces)
        return blob_id(value) if effect.recheck else self._blobs.put(value)

    def rank(self, parts: tuple[Digest, ...], rows: Rows) -> bytes:
        """Merge lists over these shard rows."""
        return encode_lists(merge_lists(self._config, self._reader(parts, rows).row_tensor))

    def ranking_problem(self, parts: tuple[Digest, ...], rows: Rows, lists: bytes) -> str | None:
        """Why merge lists are not within the tolerance over these rows, or None."""
        return lists_problem(self._config, lists, self._reader(parts, rows).row_tensor)

    def _reader(self, parts: tuple[Digest, ...], rows: Rows) -> StartReader:
        shards = tuple(tuple((share.blob, share.tokens) for share in row) for row in rows)
        spec = StartSpec(round=RoundNumber(0), global_step=0, parts=parts, shards=shards)
        return StartReader(self._config, self._blobs, spec)
