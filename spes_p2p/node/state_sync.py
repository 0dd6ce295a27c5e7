"""The certified state: on this node's disk, and in its trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spes_p2p.errors import BlobError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.node.absence import Absence
from spes_p2p.node.fetching import Holdings, LineWatch, all_unless
from spes_p2p.node.handover import Successions
from spes_p2p.node.mirrors import Mirrors
from spes_p2p.node.own_updates import OwnUpdates
from spes_p2p.node.settle import Since, branch_lost, since, then
from spes_p2p.node.training import Training
from spes_p2p.ports import Clock
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.codec import bits
from spes_p2p.protocol.head import Head
from spes_p2p.storage.ledger import Ledger

_RETRY_S = 1.0
_FETCHES_AT_ONCE = 4
_LOADS_AT_MOST = 3
"""Tries to load one state whose blobs turn out damaged on disk and are fetched again."""
_CURVE_POINTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """Where a node begins: the newest certificate of its ledger."""

    head: Head
    certificate: Certificate | None
    """None at genesis."""
    since: Since | None
    """What happened since the head that the trainer's checkpoint starts from; None: it has no checkpoint of this run's
    history."""


class StateSync:
    """The newest head, and how far this node has come with it."""

    def __init__(
        self,
        peer: PeerId,
        newest: Newest,
        holdings: Holdings,
        ledger: Ledger,
        clock: Clock,
        notify: Callable[[str, str], None],
        mirrors: Mirrors | None = None,
    ) -> None:
        self.head = newest.head
        self.holdings = holdings
        self.updates = OwnUpdates(peer, newest.head, ledger, notify)
        self._absence = Absence(peer, notify)
        self.val_curve: list[tuple[int, float]] = []
        self.blobs_missing = 0
        self._mirrors = mirrors
        self._peer = peer
        self._notify = notify
        self._certificate = newest.certificate
        self._since_loaded = newest.since
        self._since_loading: Since | None = None
        """The same from the head that the trainer is loading just now."""
        self._line = LineWatch(clock, notify)
        self._successions = Successions(peer, holdings, notify)
        self._known_peers: tuple[PeerId, ...] = ()
        self._holders: tuple[PeerId, ...] = ()
        self._overtaken = asyncio.Event()
        """Set when `head` is no longer the newest; then a new one takes its place."""

    @property
    def num_parts(self) -> tuple[int, int]:
        """(parts of psi, how many of them were kept as they were) in the newest certificate; (0, 0) at genesis."""
        if self._certificate is None:
            return (0, 0)
        body = self._certificate.body
        return len(body.parts), len(bits(body.kept, len(body.parts)))

    def knows(self, peers: Sequence[PeerId]) -> None:
        """More peers that may serve blobs."""
        self._known_peers = tuple(peers)

    def adopted(self, effect: fx.Adopt) -> None:
        """A certificate is in the ledger."""
        before, body = effect.before or self.head, effect.certificate.body
        if effect.abandoned:
            self._leave_branch(before)
        if effect.head.epoch > before.epoch:
            self._notify("warning", recovery_text(effect.head))
        self.head, self._certificate, self._holders = effect.head, effect.certificate, effect.holders
        self._keep((effect.head, *effect.anchors))
        self.updates.adopted(before, effect.head, body)
        self._absence.adopted(before, effect.head, body)
        self._successions.adopted(before, effect)
        self._line.adopted(effect.head, loading=self.blobs_missing > 0)
        if self._since_loaded is not None:
            self._since_loaded = then(self._since_loaded, before, effect.head, body, self._peer)
        if self._since_loading is not None:
            self._since_loading = then(self._since_loading, before, effect.head, body, self._peer)
        self._overtaken.set()
        self._overtaken = asyncio.Event()

    def went_back(self, effect: fx.GoBack, certificate: Certificate | None) -> None:
        """An earlier head is the newest again. `certificate`: None at genesis."""
        self.head, self._certificate, self._holders = effect.head, certificate, effect.holders
        self._keep((effect.head, *effect.anchors))
        self._leave_branch(effect.head)
        self._overtaken.set()
        self._overtaken = asyncio.Event()

    def _keep(self, heads: Sequence[Head]) -> None:
        """Keep the blobs of these states as long as those of the newest."""
        for head in heads:
            self.holdings.keeper.note(state_blobs(head), self.head.round)

    def _leave_branch(self, fork: Head) -> None:
        """What was made on the branch after `fork` is void, this peer's residual and masters included."""
        self._notify("warning", f"round {fork.round}: the tentative rounds after it were left for a better branch")
        self._since_loaded = branch_lost(fork)
        if self._since_loading is not None:
            self._since_loading = branch_lost(fork)
        self.val_curve = [point for point in self.val_curve if point[0] <= fork.round]
        self.updates.branch_lost(fork)

    def published(self, result: fx.Trained) -> None:
        """An own update is on its way."""
        self.updates.published(result.round, result.tokens)
        self.holdings.keeper.note([piece.blob for piece in result.pieces], result.round)

    # --- blobs -------------------------------------------------------------------------------------------------------

    async def bring_state(self, head: Head) -> bool:
        """Fetch what the state of `head` needs and is not here. False if a newer certificate came meanwhile: what has
        come of it by then stays, in part or whole."""
        sizes = head.run.sizes
        wanted = dict.fromkeys(head.parts, sizes.part_result_bytes)
        wanted |= {share.blob: sizes.expert_blob_bytes for row in head.state.shards for share in row.blobs}
        self.holdings.keeper.note(wanted, head.round)
        while self.head is head:
            overtaken = self._overtaken
            missing = [blob for blob in sorted(wanted) if not self.holdings.blobs.has(blob)]
            self.blobs_missing = len(missing)
            if not missing:
                self._line.loaded()
                await self.holdings.keeper.sweep(head.round)
                return self.head is head
            limit = asyncio.Semaphore(_FETCHES_AT_ONCE)
            works = [self._bring(blob, self._sources(head), wanted[blob], limit) for blob in missing]
            if not await all_unless(overtaken, works):
                await all_unless(overtaken, [_pause(_RETRY_S)])
        return False

    def _sources(self, head: Head) -> tuple[PeerId, ...]:
        peers = dict.fromkeys((*self._holders, *head.state.members, *self._known_peers))
        return tuple(peer for peer in peers if peer != self._peer)

    async def _bring(self, blob: Digest, sources: tuple[PeerId, ...], max_bytes: int, limit: asyncio.Semaphore) -> bool:
        async with limit:
            try:
                await self.holdings.fetcher.fetch(blob, sources, max_bytes)
            except BlobError:
                if self._mirrors is None or not await self._mirrors.bring(blob, max_bytes):
                    return False
            self.blobs_missing = max(0, self.blobs_missing - 1)
            return True

    # --- the trainer -------------------------------------------------------------------------------------------------

    async def load_trainer(self, training: Training) -> list[fx.HandoverTaken]:
        """Load the newest state, which is on disk, into the trainer, and take over what was handed over with it.

        Raises TrainerError, MachineError; BlobError if a blob was damaged again and again.
        """
        tries = 1
        while True:
            head, certificate = self.head, self._certificate
            self._since_loading = since(head, self._peer)
            try:
                loss = await training.load(head, certificate, self._since_loaded)
                break
            except BlobError:
                # a blob that was damaged on disk has been dropped by now
                if tries == _LOADS_AT_MOST or not await self.bring_state(head):
                    raise
                tries += 1
        self._since_loaded, self._since_loading = self._since_loading, None
        if loss is not None:
            self.val_curve = [*self.val_curve, (head.round, loss)][-_CURVE_POINTS:]
        return await self._successions.take(training, head)


def recovery_text(head: Head) -> str:
    """What a new epoch means, for people."""
    return (
        f"epoch {head.epoch} begins after a recovery, with {len(head.state.members)} members: unsafe if those left out "
        "have gone on by themselves, for then the run has split"
    )


async def _pause(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True


def state_blobs(head: Head) -> tuple[Digest, ...]:
    """All blobs of the state after a certificate, sorted."""
    return tuple(sorted({*head.parts, *(share.blob for row in head.state.shards for share in row.blobs)}))
