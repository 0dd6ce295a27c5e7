"""What the machine has done elsewhere than in itself: pieces brought and checked, parts averaged, experts ranked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import BlobError, NotFiniteError, SchemaError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.fetching import Holdings
from spes_p2p.node.work import Work
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.wire import RefusalReason

_RETRY_S = 1.0


@dataclass(slots=True)
class Tally:
    """What this node has done since it started."""

    parts_aggregated: int = 0
    updates_acknowledged: int = 0
    pieces_refused: int = 0
    rechecks: int = 0


class Errands:
    """Each method carries out one effect and gives its result as an input. All raise MachineError."""

    def __init__(
        self,
        holdings: Holdings,
        work: Work,
        head: Callable[[], Head],
        give: Callable[[fx.Input], None],
        notify: Callable[[str, str], None],
    ) -> None:
        self._holdings = holdings
        self._work = work
        self._head = head
        """The newest adopted certificate."""
        self._give = give
        self._notify = notify
        self.tally = Tally()

    async def check_piece(self, effect: fx.CheckPiece, head: Head) -> None:
        """`CheckPiece`: what cannot be had, or was damaged on disk, is missing and will be asked for again."""
        work, piece = self._work, effect.piece
        reason = work.refuse_unseen(piece)
        if reason is None and await self._bring(piece.blob, effect.sources, piece.size_bytes):
            self._holdings.keeper.note([piece.blob], self._head().round)
            try:
                reason = await work.run(lambda: work.check_piece(piece, effect.base, head.parts))
            except BlobError:
                reason = RefusalReason.MISSING
        elif reason is None:
            reason = RefusalReason.MISSING
        if reason is None:
            self.tally.updates_acknowledged += effect.piece_index == 0
        elif reason is RefusalReason.MISSING:
            await asyncio.sleep(_RETRY_S)
        else:
            self.tally.pieces_refused += 1
        self._give(fx.PieceChecked(manifest=effect.manifest, piece=effect.piece_index, reason=reason))

    async def fetch_blob(self, effect: fx.FetchBlob) -> None:
        """`FetchBlob`."""
        if await self._bring(effect.blob, effect.sources, effect.max_bytes):
            self._holdings.keeper.note([effect.blob], self._head().round)
            self._give(fx.BlobHeld(blob=effect.blob))

    async def aggregate(self, effect: fx.Aggregate, head: Head) -> None:
        """`Aggregate`: bring what lacks, again and again while the round is open, then average."""
        work = self._work
        while await self._bring_pieces(effect, head):
            try:
                value = await work.run(lambda: work.aggregate(effect))
            except BlobError:
                await asyncio.sleep(_RETRY_S)  # a piece was damaged on disk and has been dropped
                continue
            except (NotFiniteError, SchemaError) as error:
                self._notify("warning", f"part {effect.part} cannot be averaged: {error}")
                return
            if effect.recheck:
                self.tally.rechecks += 1
            else:
                self.tally.parts_aggregated += 1
                self._holdings.keeper.note([value], head.round + 1)
            self._give(fx.Aggregated(updates=effect.updates, part=effect.part, digest=value, recheck=effect.recheck))
            return

    async def _bring_pieces(self, effect: fx.Aggregate, head: Head) -> bool:
        """Whether all contributions to a part are here; False if the round was over first."""
        for contribution in effect.contributions:
            piece = contribution.pieces[effect.part]
            sources = effect.sources.get(piece.blob, (contribution.peer,))
            while not await self._bring(piece.blob, sources, piece.size_bytes):
                await asyncio.sleep(_RETRY_S)
                if self._head() is not head:
                    return False
            self._holdings.keeper.note([piece.blob], head.round)
        return self._head() is head

    async def rank(self, effect: fx.RankExperts, head: Head) -> None:
        """`RankExperts`, whose blobs are here; a leader whose blobs turn out damaged lets its view pass."""
        work = self._work
        try:
            lists = await work.run(lambda: work.rank(head.parts, effect.shards))
        except (BlobError, SchemaError, NotFiniteError) as error:
            self._notify("warning", f"the experts cannot be ranked: {error}")
            return
        self._give(fx.Ranked(cut=effect.cut, merge_lists=lists))

    async def check_ranking(self, effect: fx.CheckRanking, head: Head) -> None:
        """`CheckRanking`; a voter whose blobs turn out damaged does not vote on it."""
        work = self._work
        try:
            problem = await work.run(lambda: work.ranking_problem(head.parts, effect.shards, effect.merge_lists))
        except (BlobError, SchemaError, NotFiniteError) as error:
            self._notify("warning", f"a ranking cannot be checked: {error}")
            return
        self._give(fx.RankingChecked(body=effect.body, problem=problem))

    async def _bring(self, blob: Digest, sources: tuple[PeerId, ...], max_bytes: int) -> bool:
        """Whether the blob is here, after fetching it if it was not."""
        if self._holdings.blobs.has(blob):
            return True
        try:
            await self._holdings.fetcher.fetch(blob, sources, max_bytes)
        except BlobError:
            return False
        return True
