"""The recent certificates of one run, followed and served by the members' own code, in a folder of bounded size.

    run.manifest     the signed run manifest, as it travels
    ledger.sqlite    final certificates up to the run's tip, each verified like a member verifies it

A chain that has grown beyond its bounds begins anew: a fresh ledger goes to the tip by the skip rule, and takes the old
one's place. If nobody has what a skip needs, the old one stays as it is, and is served without growing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spes_p2p.errors import LocalStateError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.node.catching_up import SHORT_GAP, Asker, CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.history import sizes_of_nothing
from spes_p2p.node.resume import Resumption, resume
from spes_p2p.node.state_sync import state_blobs
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.codec import decode_signed_run, encode, run_id
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.storage.atomic import make_folder, write_file
from spes_p2p.storage.ledger import Ledger

MAX_ROUNDS = 2_000
"""Certificates that are kept of a run: a newcomer skips more than 1,000 rounds anyway."""
_FRESH_FOLDER = "fresh"
_RENEW_PAUSE_MS = 600_000
"""After an attempt to begin anew that failed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What chains are followed with."""

    transport: Asker
    verification: Verification
    clock: MonotonicClock
    max_bytes: int
    """Of one chain on disk."""
    max_rounds: int = MAX_ROUNDS


class Chain:
    """One run's manifest and certificates."""

    def __init__(self, folder: Path, signed: SignedRun, following: Following) -> None:
        """Raises LocalStateError if what lies there is damaged, MachineError if the disk refuses. Blocks."""
        self._folder = folder
        self._following = following
        self._genesis = genesis_head(signed.manifest, sizes_of_nothing(signed.manifest))
        self._lock = asyncio.Lock()
        """Held while the ledger is read or replaced."""
        self._is_closed = False
        self._renew_at_ms = 0
        self.run = run_id(signed.manifest)
        self.manifest = encode(signed)
        """As it travels."""
        self.held_out = signed.manifest.held_out
        make_folder(folder)
        if not (folder / MANIFEST_FILE).exists():
            write_file(folder / MANIFEST_FILE, self.manifest)
        shutil.rmtree(folder / _FRESH_FOLDER, ignore_errors=True)
        self._open()
        self.num_certificates = self._ledger.count()

    @classmethod
    def load(cls, folder: Path, following: Following) -> Chain:
        """What an earlier start has kept. Raises LocalStateError, MachineError. Blocks."""
        try:
            signed = decode_signed_run((folder / MANIFEST_FILE).read_bytes())
        except (OSError, RemoteProtocolError) as error:
            raise LocalStateError(f"{folder / MANIFEST_FILE} is damaged: {error}") from error
        return cls(folder, signed, following)

    @property
    def head(self) -> Head:
        """The newest final head."""
        return self._place.head

    def blobs(self) -> tuple[Digest, ...]:
        """The held-out set and the blobs of the newest state: what a newcomer has to fetch."""
        return (self.held_out, *state_blobs(self.head))

    def size_bytes(self) -> int:
        """Of all files on disk."""
        return sum(path.stat().st_size for path in self._folder.glob("*") if path.is_file())

    async def answer(self, asker: PeerId, question: bytes) -> Sequence[bytes]:
        """Satisfies `ports.QuestionHandler`. Raises RemoteProtocolError, LocalStateError."""
        async with self._lock:
            return () if self._is_closed else await self._source.answer(asker, question)

    async def follow(self, peers: Sequence[PeerId]) -> None:
        """Go on to the tip that these peers can show. Raises LocalStateError, MachineError."""
        if self._is_full():
            await self._renew(peers)
        if self._is_full():
            return
        await CatchUp(self._place, self._around(self._ledger)).run(peers)
        self.num_certificates = await asyncio.to_thread(self._ledger.count)

    async def close(self) -> None:
        """Let the files go."""
        async with self._lock:
            self._is_closed = True
            self._ledger.close()

    async def delete(self) -> None:
        """Forget the run."""
        await self.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _open(self) -> None:
        self._ledger = Ledger(self._folder / LEDGER_FILE)
        try:
            self._place = self._resume(self._ledger)
        except BaseException:
            self._ledger.close()
            raise
        self._source = ChainSource(self._ledger, self._genesis)

    def _resume(self, ledger: Ledger) -> Resumption:
        return resume(ledger, self._genesis, None, self._following.transport.peer_id)

    def _is_full(self) -> bool:
        return self.num_certificates >= self._following.max_rounds or self.size_bytes() >= self._following.max_bytes

    def _around(self, ledger: Ledger) -> Surroundings:
        return Surroundings(
            ledger=ledger,
            transport=self._following.transport,
            verification=self._following.verification,
            clock=self._following.clock,
            notify=_tell,
            waiting=lambda text: None,
        )

    async def _renew(self, peers: Sequence[PeerId]) -> None:
        """Begin anew at the tip; if that fails, not again for a while."""
        now_ms = self._following.clock.now_ms()
        if now_ms < self._renew_at_ms:
            return
        self._renew_at_ms = now_ms + _RENEW_PAUSE_MS
        fresh_folder = self._folder / _FRESH_FOLDER
        fresh = await asyncio.to_thread(Ledger, fresh_folder / LEDGER_FILE)
        try:
            place = self._resume(fresh)
            await CatchUp(place, replace(self._around(fresh), skip_rounds=SHORT_GAP)).run(peers)
            count = await asyncio.to_thread(fresh.count)
            arrived = place.head.round >= self.head.round and count < self._following.max_rounds
        finally:
            fresh.close()
        if arrived:
            async with self._lock:
                await asyncio.to_thread(self._replace, fresh_folder)
            self.num_certificates, self._renew_at_ms = count, 0
            logger.info("run %s: the cache begins anew at round %d", short_run(self.run), self.head.round)
        else:
            logger.warning("run %s: the cache is full and nobody can show a shorter way", short_run(self.run))
        await asyncio.to_thread(shutil.rmtree, fresh_folder, ignore_errors=True)

    def _replace(self, fresh_folder: Path) -> None:
        self._ledger.close()
        for path in self._folder.glob(f"{LEDGER_FILE}*"):
            path.unlink()
        (fresh_folder / LEDGER_FILE).rename(self._folder / LEDGER_FILE)
        self._open()


def short_run(run: RunId) -> str:
    """The beginning of a run id, for people."""
    return run.hex()[:12]


def _tell(level: str, text: str) -> None:
    """Catching up is nothing special here: it happens every few seconds."""
    logger.log(logging.WARNING if level == "warning" else logging.DEBUG, "%s", text)
