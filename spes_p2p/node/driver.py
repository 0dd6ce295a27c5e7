"""Executes the effects of the round machine: journal, messages, blobs, arithmetic, training.

One task feeds the machine, one input at a time; everything slow runs in tasks of its own and comes back as an input.
All journal entries of a batch are durable before any message of it leaves. A task that fails ends the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from spes_p2p.errors import IdentityError, RemoteProtocolError, TransportError
from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.node.errands import Errands
from spes_p2p.node.fetching import Fetcher
from spes_p2p.node.holds import Holds
from spes_p2p.node.pausing import LeaseWatch, Pace, pause_view
from spes_p2p.node.rounds import RoundTasks
from spes_p2p.node.snapshot import PauseView
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.stored import TIP_META, StoredCertificates, entry_of, tables_of
from spes_p2p.node.training import Training
from spes_p2p.node.work import Work
from spes_p2p.ports import BlobStore, Clock, Journal, QuestionHandler
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.head import Head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.round import RoundMachine
from spes_p2p.storage.ledger import Ledger, LedgerEntry

MAX_WAITING = 256
"""Messages of all peers together that wait for the machine; their senders wait with them."""
_MAX_IN_FLIGHT_PER_PEER = 64
"""Messages to one peer that wait for its transport at a time; the machine repeats what is dropped here."""
_REST_MS = 1_000
"""Before a machine that could not do what is due is asked again: without it the loop would spin."""
_LINGER_MS = 10_000
"""After a leave, for the last messages on their way: others may need this peer's vote to decide the same."""


class MessageTransport(Fetcher, Protocol):
    """What the driver needs of the transport."""

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        ...

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message. Raises TransportError, IdentityError."""
        ...

    def set_question_handler(self, handler: QuestionHandler) -> None:
        """Who answers questions."""
        ...

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """A peer's answer. Raises TransportError, RemoteProtocolError."""
        ...


@dataclass(slots=True, kw_only=True)
class Tools:
    """What the driver works with."""

    clock: Clock
    transport: MessageTransport
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
    holds: Holds = field(default_factory=Holds)
    """Why training is held."""
    is_leaving: Callable[[], bool] = lambda: False
    """A leave was asked for, perhaps before the machine can be told."""


@dataclass(slots=True)
class Tally:
    """What went in and out since the start."""

    rounds_adopted: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_refused: int = 0


@dataclass(slots=True)
class _Inbound:
    event: fx.Input
    answer: asyncio.Future[None] | None = None


class Driver:
    """One machine and its shell. `run` returns when a proper leave is complete."""

    def __init__(self, machine: RoundMachine, tools: Tools) -> None:
        self.machine = machine
        self.tally = Tally()
        self.pace = Pace()
        self._tools = tools
        self._lease_watch = LeaseWatch(tools.transport.peer_id, tools.notify)
        self._chain = StoredCertificates(tools.ledger)
        self.rounds = RoundTasks(tools.sync, tools.training, self._spawn, self.give, tools.notify, tools.holds)
        self.errands = Errands(tools.sync.holdings, tools.work, lambda: machine.head, self.give, tools.notify)
        self._inputs: asyncio.Queue[_Inbound] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._answers: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[PeerId, set[int]] = {}
        self._identity_reports: dict[PeerId, IdentityError] = {}
        self.heard_at_ms = tools.clock.now_ms()
        """When another member was last heard of, or reached."""
        self._left_at_ms: int | None = None
        self._rests_until_ms = 0
        self._told_of_stuck_machine = False
        self._failure: BaseException | None = None
        self._has_ended = False

    # --- inputs ------------------------------------------------------------------------------------------------------

    def give(self, event: fx.Input) -> None:
        """Queue an input of this node's own."""
        self._inputs.put_nowait(_Inbound(event))

    def peers_known(self, peers: tuple[PeerId, ...]) -> None:
        """Discovery found these peers of the run."""
        self._tools.sync.knows(peers)
        self.give(fx.PeersKnown(peers=peers))

    async def receive(self, sender: PeerId, data: bytes) -> None:
        """Handler of the transport: returns once the machine has taken the message, and waits while too many wait.

        Raises RemoteProtocolError if the machine does, or if the driver has ended.
        """
        async with self._room:
            if self._has_ended:
                raise RemoteProtocolError(None, "this node is ending")
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._answers.add(answer)
            try:
                self._inputs.put_nowait(_Inbound(fx.Received(sender=sender, data=data), answer))
                await answer
            finally:
                self._answers.discard(answer)

    async def run(self) -> None:
        """Feed the machine until a proper leave is complete; raises what made a task of the driver fail."""
        try:
            self._spawn(self._watch_holds(), "watch holds")
            self.rounds.load()
            await self._execute(self.machine.start(self._tools.clock.now_ms()))
            while not self._may_end():
                inbound = await self._next_input()
                if self._failure is not None:
                    raise self._failure
                await self._feed(inbound)
        finally:
            await self._end()

    def _may_end(self) -> bool:
        if self._left_at_ms is None:
            return False
        return not self._in_flight or self._tools.clock.now_ms() >= self._left_at_ms + _LINGER_MS

    async def _next_input(self) -> _Inbound:
        deadlines = [self.machine.deadline_ms()]
        if self._left_at_ms is not None:
            deadlines.append(self._left_at_ms + _LINGER_MS)
        deadline = min((max(at, self._rests_until_ms) for at in deadlines if at is not None), default=None)
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
            self._heard(inbound.event.sender)
        try:
            effects = self.machine.handle(inbound.event, now_ms)
        except RemoteProtocolError as problem:
            error = problem
            self.tally.messages_refused += 1
            effects = self._go_on(now_ms)
        await self._execute(effects)
        if self.rounds.is_held_back and self.machine.progress(now_ms).manifests:
            self.rounds.give_up()
        if inbound.answer is not None and not inbound.answer.done():
            if error is None:
                inbound.answer.set_result(None)
            else:
                inbound.answer.set_exception(error)

    async def _watch_holds(self) -> None:
        """Tell the machine and the trainer when a reason to hold training comes or goes."""
        holds, told = self._tools.holds, False
        while True:
            if holds.held != told:
                told = holds.held
                self.give(fx.HoldWanted(held=told))
            self.rounds.hold_changed()
            self._look_at_leases()
            self._tools.changed()
            await holds.changed.wait()

    def _go_on(self, now_ms: int) -> list[fx.Effect]:
        """What is due all the same after an input was refused. What the machine cannot do now is tried again later: a
        peer's nonsense that it took in must not end this node."""
        try:
            return self.machine.handle(fx.Tick(), now_ms)
        except RemoteProtocolError as problem:
            self.tally.messages_refused += 1
            self._rests_until_ms = now_ms + _REST_MS
            if not self._told_of_stuck_machine:
                self._told_of_stuck_machine = True
                self._tools.notify("error", f"round {self.machine.terms.round} is held up by a message: {problem}")
            return []

    def _heard(self, peer: PeerId) -> None:
        if peer in self.machine.terms.members:
            self.heard_at_ms = self._tools.clock.now_ms()

    def close(self) -> None:
        """Take no more messages: no sender waits for an answer that will not come. Also for a driver that never ran."""
        self._has_ended = True
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(RemoteProtocolError(None, "this node is ending"))

    async def _end(self) -> None:
        """Nothing of the driver runs on."""
        self.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self.give(fx.Tick())  # `run` may be waiting for an input

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
        errands, head = self.errands, self.machine.head
        match effect:
            case fx.Persist():
                pass  # all of a batch are durable by now
            case fx.Send():
                self._send(effect)
            case fx.Train():
                self.rounds.train(effect)
            case fx.StopTraining():
                self.rounds.stop(effect.round)
            case fx.CheckPiece():
                self._spawn(errands.check_piece(effect, head), "check piece")
            case fx.FetchBlob():
                self._spawn(errands.fetch_blob(effect), "fetch blob")
            case fx.Aggregate():
                self._spawn(errands.aggregate(effect, head), "aggregate")
            case fx.RankExperts():
                self._spawn(errands.rank(effect, head), "rank experts")
            case fx.CheckRanking():
                self._spawn(errands.check_ranking(effect, head), "check ranking")
            case fx.Adopt():
                await self._adopt(effect)
            case fx.GoBack():
                await self._go_back(effect)
            case fx.Serve():
                self._serve(effect)
            case fx.Left():
                self._left_at_ms = self._tools.clock.now_ms()
            case fx.UpdateRefused():
                self._tools.sync.updates.refused(effect.round, effect.reason)
            case fx.Notify():
                self._tools.notify(effect.level, effect.text)

    def _send(self, send: fx.Send) -> None:
        flying = self._in_flight.setdefault(send.to, set())
        if send.ticket not in flying and len(flying) < _MAX_IN_FLIGHT_PER_PEER:
            flying.add(send.ticket)
            self._spawn(self._deliver(send), "send")

    async def _deliver(self, send: fx.Send) -> None:
        delivered: fx.Input = fx.Tick()
        try:
            await self._tools.transport.send(send.to, send.data)
            self.tally.messages_sent += 1
            self._heard(send.to)
            self._identity_reports.pop(send.to, None)
            delivered = fx.Delivered(ticket=send.ticket)
        except TransportError:
            pass  # the machine repeats what matters
        except IdentityError as error:
            self.identity_reported(send.to, error)
        finally:
            flying = self._in_flight[send.to]
            flying.discard(send.ticket)
            if not flying:
                del self._in_flight[send.to]
        if isinstance(delivered, fx.Delivered) or self._left_at_ms is not None:
            self.give(delivered)

    def identity_reported(self, peer: PeerId, error: IdentityError) -> None:
        """A peer says that it talks with another process of this identity. Enough members for an honest one among
        them are believed: a single liar must not end a node."""
        terms = self.machine.terms
        self._identity_reports[peer] = error
        if len(self._identity_reports.keys() & set(terms.members)) > terms.num_faults:
            self._fail(error)

    def _serve(self, serve: fx.Serve) -> None:
        """Round 0 is the manifest; later rounds come from the ledger."""
        if serve.round == 0:
            data = encode(self._tools.signed_run)
        else:
            stored = self._stored(RoundNumber(serve.round))
            if stored is None:
                return
            data = stored.certificate
        self._send(fx.Send(ticket=-serve.round, to=serve.to, data=data))

    def _stored(self, number: RoundNumber) -> LedgerEntry | None:
        """This node's certificate of a round, tentative ones of its own chain included."""
        ledger, head = self._tools.ledger, self.machine.head
        if number > head.last_final.round:
            return ledger.by_hash(head.branch[number - head.height].hash) if number <= head.round else None
        return self._chain.entry(number)

    async def _adopt(self, effect: fx.Adopt) -> None:
        """Store the certificate and that it is the tip, in one transaction, and go on from there."""
        entry, tables = entry_of(effect.certificate), tables_of(effect.head)
        tip = {TIP_META: bytes(effect.head.hash)}
        await asyncio.to_thread(lambda: self._tools.ledger.append(entry, meta=tip, tables=tables))
        self.tally.rounds_adopted += 1
        self.pace.adopted(self._tools.clock.now_ms())
        self._look_at_leases()
        if effect.abandoned:
            self.rounds.abandon()
        self._tools.sync.adopted(effect)
        journal = self._tools.journal
        closed = f"{effect.head.epoch:06d}/{effect.head.height:010d}/"
        await asyncio.to_thread(lambda: journal.prune([key for key in journal.scan() if key < closed]))
        self.rounds.load()

    async def _go_back(self, effect: fx.GoBack) -> None:
        await asyncio.to_thread(self._tools.ledger.set_meta, TIP_META, bytes(effect.head.hash))
        self.rounds.abandon()
        entry = await asyncio.to_thread(self._tools.ledger.by_hash, effect.head.hash)
        self._tools.sync.went_back(effect, decode_certificate(entry.certificate) if entry is not None else None)
        self.rounds.load()

    def _look_at_leases(self) -> None:
        leaving = self._tools.is_leaving()
        self._lease_watch.look(self._tools.holds, self.machine.head, self.pause(), leaving=leaving)

    # --- for the rest of the node -------------------------------------------------------------------------------------

    @property
    def loaded(self) -> Head | None:
        """The head whose start the trainer has loaded."""
        return self._tools.training.loaded

    @property
    def has_left(self) -> bool:
        """Whether a proper leave is complete, but for the last messages on their way."""
        return self._left_at_ms is not None

    def pause(self) -> PauseView | None:
        """What the hold of training means for this node's shards; None: it is not held."""
        if not self._tools.holds.held:
            return None
        now_ms = self._tools.clock.now_ms()
        elapsed_ms = self.machine.progress(now_ms).elapsed_ms
        head, me, leaving = self.machine.head, self._tools.transport.peer_id, self._tools.is_leaving()
        return pause_view(self._tools.holds, head, me, self.pace, now_ms=now_ms, elapsed_ms=elapsed_ms, leaving=leaving)

    def pin(self, blobs: list[Digest]) -> None:
        """These blobs are needed by others until this node ends."""
        self._tools.sync.holdings.keeper.pin(blobs)
