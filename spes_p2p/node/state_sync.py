"""The certified state on this node's disk and in its trainer; what became of its own updates; hand-overs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from spes_p2p.errors import BlobError, SchemaError, TrainerError
from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.node.handover import MAX_INDEX_BYTES, decode_index
from spes_p2p.node.keeping import Keeper
from spes_p2p.node.settle import accepted_base
from spes_p2p.node.training import Training
from spes_p2p.ports import BlobStore
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import Certificate
from spes_p2p.protocol.params import LATE_ROUNDS
from spes_p2p.storage.ledger import Ledger, OwnUpdate

_RETRY_S = 1.0
_FETCHES_AT_ONCE = 4
_MAX_HANDOVER_BYTES = 8 << 30
_CURVE_POINTS = 500
_MAX_UPDATES = 1_000_000


class Fetcher(Protocol):
    """What brings blobs."""

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        """Bring a blob into the store. Raises BlobError."""
        ...


class StateSync:
    """The newest head, and how far this node has come with it."""

    def __init__(
        self, peer: PeerId, head: Head, certificate: Certificate | None, blobs: BlobStore, fetcher: Fetcher,
        ledger: Ledger, keeper: Keeper, notify: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.head = head
        self.keeper = keeper
        self.val_curve: list[tuple[int, float]] = []
        self._certificate = certificate
        self._resumed: Head | None = None
        self._peer = peer
        self._blobs = blobs
        self._fetcher = fetcher
        self._ledger = ledger
        self._notify = notify
        self._known_peers: tuple[PeerId, ...] = ()
        self._holders: tuple[PeerId, ...] = ()
        self._updates = {update.round: update for update in ledger.updates(_MAX_UPDATES)}
        self._pending: dict[int, int] = {
            update.round: update.tokens for update in self._updates.values() if update.verdict == "pending"
        }
        self._handovers: list[tuple[PeerId, int, Digest, tuple[int, ...], tuple[int, ...]]] = []
        """(leaver, round, index blob, shards it left that are mine now, those of them that are new to me)."""
        self.blobs_missing = 0

    def knows(self, peers: Sequence[PeerId]) -> None:
        """More peers that may serve blobs."""
        self._known_peers = tuple(peers)

    def resumed_from(self, head: Head) -> None:
        """The trainer's checkpoint belongs to the round after this head."""
        self._resumed = head

    # --- certificates ------------------------------------------------------------------------------------------------

    def adopted(self, effect: fx.Adopt) -> None:
        """A certificate is in the ledger."""
        before, self.head, self._certificate = self.head, effect.head, effect.certificate
        self._holders = effect.holders
        self.keeper.note(_state_blobs(effect.head), effect.head.round)
        self._settle_updates(before, effect.head)
        mine = set(effect.head.state.shards_of(self._peer))
        had = set(before.state.shards_of(self._peer))
        for leaver, blob, _ in effect.handovers:
            left = tuple(sorted(set(before.state.shards_of(leaver)) & mine))
            if leaver != self._peer and left:
                new = tuple(shard for shard in left if shard not in had)
                self._handovers.append((leaver, effect.head.round, blob, left, new))

    def published(self, result: fx.Trained) -> None:
        """An own update is on its way."""
        self._pending[result.round] = result.tokens
        self._record(result.round, "pending", result.tokens)
        self.keeper.note([piece.blob for piece in result.pieces], result.round)

    def _settle_updates(self, before: Head, after: Head) -> None:
        base = accepted_base(before, after, self._peer)
        for round_number, tokens in sorted(self._pending.items()):
            verdict = ""
            if round_number == base:
                verdict = "accepted" if round_number == after.round else "accepted late"
            elif base is not None and round_number < base:
                verdict = "superseded"
            elif round_number + LATE_ROUNDS <= after.round:
                verdict = "not included"
            if verdict:
                del self._pending[round_number]
                self._record(round_number, verdict, tokens)
                if verdict != "accepted":
                    self._notify("warning", f"this node's update of round {round_number} was {verdict}")

    def _record(self, round_number: int, verdict: str, tokens: int) -> None:
        update = OwnUpdate(round=RoundNumber(round_number), verdict=verdict, tokens=tokens)
        self._updates[update.round] = update
        self._ledger.record_update(update)

    def own_updates(self, limit: int) -> tuple[OwnUpdate, ...]:
        """What became of this node's newest updates, oldest first."""
        return tuple(self._updates[number] for number in sorted(self._updates)[-limit:])

    @property
    def tokens_certified(self) -> int:
        """Tokens of this node's accepted updates."""
        return sum(update.tokens for update in self._updates.values() if update.verdict.startswith("accepted"))

    # --- blobs -------------------------------------------------------------------------------------------------------

    async def bring_state(self, head: Head) -> bool:
        """Fetch what the state of `head` needs and is not here. False if a newer certificate came meanwhile."""
        sizes = head.run.sizes
        wanted = dict.fromkeys(head.parts, sizes.part_result_bytes)
        wanted |= {share.blob: sizes.expert_blob_bytes for row in head.state.shards for share in row.blobs}
        while True:
            missing = [blob for blob in sorted(wanted) if not self._blobs.has(blob)]
            self.blobs_missing = len(missing)
            if self.head is not head:
                return False
            if not missing:
                self.keeper.note(wanted, head.round)
                await asyncio.to_thread(self.keeper.sweep, head.round)
                return True
            limit = asyncio.Semaphore(_FETCHES_AT_ONCE)
            if not all(await asyncio.gather(*(self._bring(head, blob, wanted[blob], limit) for blob in missing))):
                await asyncio.sleep(_RETRY_S)

    def _sources(self, head: Head) -> tuple[PeerId, ...]:
        peers = dict.fromkeys((*self._holders, *head.state.members, *self._known_peers))
        return tuple(peer for peer in peers if peer != self._peer)

    async def _bring(self, head: Head, blob: Digest, max_bytes: int, limit: asyncio.Semaphore) -> bool:
        """Whether the blob of a state came; not if that state is no longer wanted."""
        async with limit:
            if self.head is not head or self._blobs.has(blob):
                return self.head is head
            try:
                await self._fetcher.fetch(blob, self._sources(head), max_bytes)
            except BlobError:
                return False
            return True

    # --- the trainer -------------------------------------------------------------------------------------------------

    async def load_trainer(self, training: Training) -> None:
        """Load the newest state into the trainer. Raises TrainerError."""
        head, certificate = self.head, self._certificate
        loss = await training.load(head, certificate, self._resumed)
        self._resumed = None
        if loss is not None:
            self.val_curve = [*self.val_curve, (head.round, loss)][-_CURVE_POINTS:]

    async def take_over(self, training: Training) -> list[fx.HandoverTaken]:
        """Import what leavers handed over for shards that are this peer's now; what each leaver may be told."""
        waiting, self._handovers = self._handovers, []
        taken = []
        for leaver, round_number, blob, _, new in waiting:
            try:
                await self._import(training, leaver, blob, new)
            except (BlobError, SchemaError, TrainerError) as error:
                self._notify("warning", f"a hand-over could not be taken: {error}")
            taken.append(fx.HandoverTaken(leaver=leaver, round=round_number, handover=blob))
        return taken

    async def _import(self, training: Training, leaver: PeerId, index: Digest, shards: tuple[int, ...]) -> None:
        if not shards:
            return
        await self._fetcher.fetch(index, (leaver,), MAX_INDEX_BYTES)
        handed = decode_index(self._blobs.read(index))
        for shard in shards:
            if shard in handed:
                blob, size_bytes = handed[shard]
                await self._fetcher.fetch(blob, (leaver,), min(size_bytes, _MAX_HANDOVER_BYTES))
                await training.take_over(shard, blob)


def _state_blobs(head: Head) -> list[Digest]:
    return [*head.parts, *(share.blob for row in head.state.shards for share in row.blobs)]
