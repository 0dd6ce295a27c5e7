"""Executes the effects of the round machine: journal, messages, blobs, arithmetic, training.

One task feeds the machine, one input at a time; everything slow runs in tasks of its own and comes back as an input.
All journal entries of a batch are durable before any message of it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from spes_p2p.errors import (
    BlobError,
    IdentityError,
    NotFiniteError,
    RemoteProtocolError,
    SchemaError,
    TrainerError,
    TransportError,
)
from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.training import Training
from spes_p2p.node.work import Work
from spes_p2p.ports import BlobStore, Clock, Journal
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.round import RoundMachine
from spes_p2p.protocol.wire import RefusalReason
from spes_p2p.storage.ledger import Ledger, LedgerEntry

_MAX_IN_FLIGHT_PER_PEER = 64
"""Messages to one peer that wait for its transport at a time; the machine repeats what is dropped here."""
_RETRY_FETCH_S = 1.0


class BlobTransport(Protocol):
    """What the driver needs of the transport."""

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message. Raises TransportError."""
        ...

    async def fetch(self, blob: Digest, sources: tuple[PeerId, ...], max_bytes: int | None = None) -> None:
        """Bring a blob into the store. Raises BlobError."""
        ...


@dataclass(slots=True, kw_only=True)
class Tools:
    """What the driver works with."""

    clock: Clock
    transport: BlobTransport
    blobs: BlobStore
    journal: Journal
    ledger: Ledger
    work: Work
    training: Training
    sync: StateSync
    signed_run: SignedRun
    notify: Callable[[str, str], None]
    """(level, text) for people."""
    changed: Callable[[], None]
    """Something a user interface shows may have changed."""


@dataclass(slots=True)
class Tally:
    """What this node has done since it started."""

    rounds_adopted: int = 0
    parts_aggregated: int = 0
    updates_published: int = 0
    updates_acknowledged: int = 0
    pieces_refused: int = 0
    rechecks: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_refused: int = 0


@dataclass(slots=True)
class _Inbound:
    event: fx.Input
    answer: asyncio.Future[None] | None = field(default=None)


class Driver:
    """One machine and its shell. `run` returns when a proper leave is complete."""

    def __init__(self, machine: RoundMachine, tools: Tools) -> None:
        self.machine = machine
        self.tally = Tally()
        self._tools = tools
        self._inputs: asyncio.Queue[_Inbound] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[PeerId, set[int]] = {}
        self._training: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._stopped_round: int | None = None
        """Training of this round was told to end, perhaps before it began."""
        self._left = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- inputs ------------------------------------------------------------------------------------------------------

    def give(self, event: fx.Input) -> None:
        """Queue an input."""
        self._inputs.put_nowait(_Inbound(event))

    async def receive(self, sender: PeerId, data: bytes) -> None:
        """Handler of the transport. Raises RemoteProtocolError if the machine does."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inputs.put_nowait(_Inbound(fx.Received(sender=sender, data=data), answer))
        await answer

    async def run(self) -> None:
        """Feed the machine until a proper leave is complete; raises what made a task of the driver fail."""
        try:
            self.load_state()
            await self._execute(self.machine.start(self._tools.clock.now_ms()))
            while not self._left.is_set():
                inbound = await self._next_input()
                if self._failure.done():
                    self._failure.result()
                await self._feed(inbound)
        finally:
            await self._end()

    async def _next_input(self) -> _Inbound:
        deadline = self.machine.deadline_ms()
        timeout_s = None if deadline is None else max(0, deadline - self._tools.clock.now_ms()) / 1000
        try:
            async with asyncio.timeout(timeout_s):
                return await self._inputs.get()
        except TimeoutError:
            return _Inbound(fx.Tick())

    async def _feed(self, inbound: _Inbound) -> None:
        now_ms = self._tools.clock.now_ms()
        error: RemoteProtocolError | None = None
        if isinstance(inbound.event, fx.Received):
            self.tally.messages_received += 1
        try:
            effects = self.machine.handle(inbound.event, now_ms)
        except RemoteProtocolError as problem:
            error = problem
            self.tally.messages_refused += 1
            effects = self.machine.handle(fx.Tick(), now_ms)
        await self._execute(effects)
        if inbound.answer is not None and not inbound.answer.done():
            if error is None:
                inbound.answer.set_result(None)
            else:
                inbound.answer.set_exception(error)

    async def _end(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._inputs.empty():
            answer = self._inputs.get_nowait().answer
            if answer is not None and not answer.done():
                answer.set_exception(RemoteProtocolError(None, "this node is ending"))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)
            self.give(fx.Tick())

    # --- effects -----------------------------------------------------------------------------------------------------

    async def _execute(self, effects: list[fx.Effect]) -> None:
        entries = {
            key: data for effect in effects if isinstance(effect, fx.Persist) for key, data in effect.entries.items()
        }
        if entries:
            await asyncio.to_thread(self._tools.journal.put, entries)
        for effect in effects:
            await self._one(effect)
        if effects:
            self._tools.changed()

    async def _one(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Persist():
                pass
            case fx.Send():
                self._send(effect)
            case fx.Train():
                self._training = self._spawn(self._train(effect, self._loading), "train")
            case fx.StopTraining():
                self._stopped_round = effect.round
                self._tools.training.stop()
            case fx.CheckPiece():
                self._spawn(self._check_piece(effect), "check piece")
            case fx.FetchBlob():
                self._spawn(self._fetch_blob(effect), "fetch blob")
            case fx.Aggregate():
                self._spawn(self._aggregate(effect), "aggregate")
            case fx.RankExperts():
                self._spawn(self._rank(effect), "rank experts")
            case fx.CheckRanking():
                self._spawn(self._check_ranking(effect), "check ranking")
            case fx.Adopt():
                await self._adopt(effect)
            case fx.Serve():
                self._serve(effect)
            case fx.Left():
                self._left.set()
            case fx.Notify():
                self._tools.notify(effect.level, effect.text)

    def _send(self, send: fx.Send) -> None:
        flying = self._in_flight.setdefault(send.to, set())
        if send.ticket not in flying and len(flying) < _MAX_IN_FLIGHT_PER_PEER:
            flying.add(send.ticket)
            self._spawn(self._deliver(send), "send")

    async def _deliver(self, send: fx.Send) -> None:
        try:
            await self._tools.transport.send(send.to, send.data)
        except (TransportError, IdentityError):
            return  # the machine repeats what matters
        finally:
            self._in_flight[send.to].discard(send.ticket)
        self.tally.messages_sent += 1
        self.give(fx.Delivered(ticket=send.ticket))

    def _serve(self, serve: fx.Serve) -> None:
        """Round 0 is the manifest; later rounds come from the ledger."""
        if serve.round == 0:
            data = encode(self._tools.signed_run)
        else:
            entry = self._tools.ledger.by_round(RoundNumber(serve.round))
            if entry is None:
                return
            data = entry.certificate
        self._send(fx.Send(ticket=-serve.round, to=serve.to, data=data))

    # --- blobs and arithmetic ----------------------------------------------------------------------------------------

    async def _bring(self, blob: Digest, sources: tuple[PeerId, ...], max_bytes: int) -> bool:
        """Whether the blob is here, after fetching it if it was not."""
        if self._tools.blobs.has(blob):
            return True
        try:
            await self._tools.transport.fetch(blob, sources, max_bytes)
        except BlobError:
            return False
        return True

    async def _check_piece(self, effect: fx.CheckPiece) -> None:
        work, piece = self._tools.work, effect.piece
        reason = work.refuse_unseen(piece)
        if reason is None and not await self._bring(piece.blob, effect.sources, piece.size_bytes):
            await asyncio.sleep(_RETRY_FETCH_S)
            reason = RefusalReason.MISSING
        if reason is None:
            self._note([piece.blob])
            parts = self.machine.head.parts
            reason = await work.run(lambda: work.check_piece(piece, effect.base, parts))
        if reason is None:
            self.tally.updates_acknowledged += effect.piece_index == 0
        else:
            self.tally.pieces_refused += reason is not RefusalReason.MISSING
        self.give(fx.PieceChecked(manifest=effect.manifest, piece=effect.piece_index, reason=reason))

    async def _fetch_blob(self, effect: fx.FetchBlob) -> None:
        if await self._bring(effect.blob, effect.sources, effect.max_bytes):
            self._note([effect.blob])
            self.give(fx.BlobHeld(blob=effect.blob))

    async def _aggregate(self, effect: fx.Aggregate) -> None:
        """Bring what lacks, again and again while the round is open, then average."""
        work, round_number = self._tools.work, self.machine.head.round
        for contribution in effect.contributions:
            piece = contribution.pieces[effect.part]
            sources = effect.sources.get(piece.blob, (contribution.peer,))
            while not await self._bring(piece.blob, sources, piece.size_bytes):
                await asyncio.sleep(_RETRY_FETCH_S)
                if self.machine.head.round != round_number:
                    return
        try:
            value = await work.run(lambda: work.aggregate(effect))
        except (NotFiniteError, SchemaError, BlobError) as error:
            self._tools.notify("warning", f"part {effect.part} cannot be averaged: {error}")
            return
        if effect.recheck:
            self.tally.rechecks += 1
        else:
            self.tally.parts_aggregated += 1
            self._note([value])
        self.give(fx.Aggregated(updates=effect.updates, part=effect.part, digest=value, recheck=effect.recheck))

    async def _rank(self, effect: fx.RankExperts) -> None:
        work, parts = self._tools.work, self.machine.head.parts
        lists = await work.run(lambda: work.rank(parts, effect.shards))
        self.give(fx.Ranked(cut=effect.cut, merge_lists=lists))

    async def _check_ranking(self, effect: fx.CheckRanking) -> None:
        work, parts = self._tools.work, self.machine.head.parts
        problem = await work.run(lambda: work.ranking_problem(parts, effect.shards, effect.merge_lists))
        self.give(fx.RankingChecked(body=effect.body, problem=problem))

    def keep(self, blobs: list[Digest]) -> None:
        """These blobs are needed by others for a while."""
        self._note(blobs)

    def _note(self, blobs: list[Digest]) -> None:
        self._tools.sync.keeper.note(blobs, self.machine.head.round)

    # --- training and adoption ---------------------------------------------------------------------------------------

    async def _train(self, order: fx.Train, loading: asyncio.Task[None] | None) -> None:
        """Train once the start is loaded; tell the machine what came of it."""
        if loading is not None:
            await asyncio.wait([loading])
        stopped = self._stopped_round == order.round
        result = await self._tools.training.train(order) if not stopped else fx.nothing_trained(order.round)
        if result.pieces:
            self.tally.updates_published += 1
            self._tools.sync.published(result)
        self.give(result)

    async def training_ended(self) -> None:
        """Return when no training is under way."""
        if self._training is not None and not self._training.done():
            await asyncio.wait([self._training])

    async def _adopt(self, effect: fx.Adopt) -> None:
        body = effect.certificate.body
        entry = LedgerEntry(
            epoch=body.epoch,
            round=RoundNumber(body.round),
            hash=body_hash(body),
            body=encode(body),
            certificate=encode(effect.certificate),
            attachments=effect.certificate.merge_lists,
            final=body.final,
        )
        await asyncio.to_thread(self._tools.ledger.append, entry)
        self.tally.rounds_adopted += 1
        self._tools.sync.adopted(effect)
        journal = self._tools.journal
        closed = f"{body.epoch:06d}/{body.round + 1:010d}/"
        await asyncio.to_thread(lambda: journal.prune([key for key in journal.scan() if key < closed]))
        self.load_state()

    def load_state(self) -> None:
        """Bring the state of the newest certificate here and into the trainer."""
        self._loading = self._spawn(self._load(self._tools.sync.head, self._loading, self._training), "load state")

    async def _load(self, head: Head, before: asyncio.Task[None] | None, training: asyncio.Task[None] | None) -> None:
        """One load after the other; one that a newer certificate has overtaken is given up."""
        sync = self._tools.sync
        if before is not None and not before.done():
            await asyncio.wait([before])
        if not await sync.bring_state(head):
            return
        self.give(fx.StateReady(round=head.round + 1))
        if training is not None and not training.done():
            # what an older round has trained becomes a late update
            self._tools.training.stop()
            await asyncio.wait([training])
        if sync.head is not head:
            return
        try:
            await sync.load_trainer(self._tools.training)
            for taken in await sync.take_over(self._tools.training):
                self.give(taken)
        except TrainerError as error:
            self._tools.notify("error", f"this round gives no update: {error}")
        self._tools.changed()
