"""Answers questions about the chain from this node's ledger (docs/protocol.md, section 8).

An answer costs a bounded amount of work: heads of old rounds are found from the nearest tables that were kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.node.stored import StoredChain, certificates_between
from spes_p2p.protocol.codec import MAX_MESSAGE_BYTES, decode_certificate, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.questions import (
    MAX_CERTIFICATES,
    CertificatesQuestion,
    Tables,
    TablesQuestion,
    Tip,
    TipQuestion,
    Waypoint,
    WaypointQuestion,
    decode_question,
)
from spes_p2p.storage.ledger import Ledger

_WORKS_AT_ONCE = 2
"""Heads of old rounds that are computed at a time: this node has other things to do."""


class ChainSource:
    """Satisfies `ports.QuestionHandler` by `answer`."""

    def __init__(self, ledger: Ledger, genesis: Head) -> None:
        self._ledger = ledger
        self._genesis = genesis
        self._stored = StoredChain(ledger, genesis)
        self._places = asyncio.Semaphore(_WORKS_AT_ONCE)
        self._is_closed = False

    async def answer(self, asker: PeerId, data: bytes) -> Sequence[bytes]:
        """Frames of the answer; none: this node does not have what is asked for. Raises RemoteProtocolError."""
        question = decode_question(data, asker)
        async with self._places:
            if self._is_closed:
                return ()
            match question:
                case TipQuestion():
                    return await asyncio.to_thread(self._tip)
                case CertificatesQuestion():
                    return await asyncio.to_thread(self._certificates, question)
                case WaypointQuestion():
                    return await asyncio.to_thread(self._waypoint, question)
                case TablesQuestion():
                    return await asyncio.to_thread(self._tables, question)

    async def close(self) -> None:
        """Have nothing any more; returns once no answer reads the ledger, so that it can be closed."""
        self._is_closed = True
        async with contextlib.AsyncExitStack() as all_places:
            for _ in range(_WORKS_AT_ONCE):
                await all_places.enter_async_context(self._places)

    def _tip(self) -> list[bytes]:
        latest, gaps = self._ledger.latest(), self._ledger.gaps()
        if latest is None:
            return [encode(Tip(0, 0, Digest(self._genesis.run.run_id), 0))]
        return [encode(Tip(latest.epoch, latest.round, latest.hash, gaps[-1].to_round if gaps else 1))]

    def _certificates(self, question: CertificatesQuestion) -> list[bytes]:
        """Successive ones, up to the limits of an answer."""
        frames: list[bytes] = []
        left = MAX_MESSAGE_BYTES
        last = question.first + min(question.count, MAX_CERTIFICATES) - 1
        for entry in certificates_between(self._ledger, question.first, last):
            left -= len(entry.certificate)
            if left < 0:
                break
            frames.append(entry.certificate)
        return frames

    def _waypoint(self, question: WaypointQuestion) -> list[bytes]:
        kept = next((gap.waypoints[-1] for gap in self._ledger.gaps() if gap.to_round == question.round), None)
        if kept is not None:
            return _one(kept)
        entry = self._ledger.by_round(RoundNumber(question.round))
        if entry is None:
            return []
        certificate = decode_certificate(entry.certificate)
        before = self._ledger.by_hash(Digest(certificate.body.prev))
        head = self._stored.head(before.round) if before is not None else None
        if before is None or head is None:
            return []
        return _one(encode(Waypoint(certificate, decode_certificate(before.certificate).body, head.state.roster)))

    def _tables(self, question: TablesQuestion) -> list[bytes]:
        head = self._stored.head(question.round)
        return [] if head is None else _one(encode(Tables(head.state)))


def _one(frame: bytes) -> list[bytes]:
    return [frame] if len(frame) <= MAX_MESSAGE_BYTES else []
