"""A volunteer's node, from start to end: identity, network, manifest, trainer, machine.

    lock the data folder -> network -> manifest (disk, else peers) -> held-out set -> trainer -> round machine

Everything that was begun is ended in reverse, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.digests import digest
from spes_p2p.errors import LocalStateError, SpesError
from spes_p2p.ids import PeerId
from spes_p2p.network.link import InviteLink
from spes_p2p.network.transport import NetworkOptions, P2PTransport
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.control import NodeHandle
from spes_p2p.node.driver import Driver, Tools
from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, JOURNAL_FILE, LEDGER_FILE, TRAINER_FOLDER
from spes_p2p.node.handover import encode_index
from spes_p2p.node.history import read_manifest, replay
from spes_p2p.node.joining import ManifestSeeker, bring_held_out, check_admission, save_manifest
from spes_p2p.node.keeping import Keeper
from spes_p2p.node.log import LogBridge, NodeLog
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.training import Training
from spes_p2p.node.view import TrainerWatch, View
from spes_p2p.node.work import Work
from spes_p2p.node.worker import Worker
from spes_p2p.node.worker_messages import Hello
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import run_id
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.messages import Certificate, SignedRun
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.storage.ledger import Ledger
from spes_p2p.storage.lock import FolderLock

_FIND_EVERY_S = 20.0


class Node:
    """A running node. Satisfies `control.NodeHandle`."""

    def __init__(self, config: NodeConfig, link: InviteLink) -> None:
        self._config = config
        self._link = link
        self._clock = MonotonicClock()
        self._log = NodeLog()
        self._view: View | None = None
        self._driver: Driver | None = None
        self._training: Training | None = None
        self._blobs: DiskBlobs | None = None
        self._stopping = asyncio.Event()
        self._leave_wanted = asyncio.Event()

    # --- handle ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> NodeSnapshot:
        """The node as it is now."""
        if self._view is None:
            raise LocalStateError("the node has not started yet")
        return self._view.snapshot(self._clock.now_ms())

    def events(self, after: int) -> tuple[LogEvent, ...]:
        """Log lines above `after`."""
        return self._log.after(after)

    async def wait_change(self, after: int, timeout_s: float) -> None:
        """Return when there is something new, at the latest after the time."""
        await self._log.wait(after, timeout_s)

    def request_leave(self) -> None:
        """Leave properly."""
        if not self._leave_wanted.is_set():
            self._log.tell("info", "leaving: this round is finished first")
            self._leave_wanted.set()

    def request_stop(self) -> None:
        """End now."""
        self._stopping.set()

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[NodeHandle], Awaitable[None]] | None) -> int:
        """Run until a leave is complete or a stop is asked for; returns the exit code. Raises SpesError."""
        async with contextlib.AsyncExitStack() as stack:
            config = self._config
            stack.enter_context(FolderLock(config.data_dir))
            bridge = LogBridge(self._log)
            logging.getLogger("spes_p2p").addHandler(bridge)
            stack.callback(logging.getLogger("spes_p2p").removeHandler, bridge)
            identity = load_or_create_identity(config.data_dir / IDENTITY_FILE)
            signed = read_manifest(config.data_dir)
            if signed is not None and run_id(signed.manifest) != self._link.run:
                raise LocalStateError(
                    f"{config.data_dir} belongs to another run\nGive this run a folder of its own with --data-dir."
                )
            self._blobs = DiskBlobs(config.data_dir / BLOBS_FOLDER)
            transport = await P2PTransport.create(identity, self._blobs, self._network_options(signed))
            stack.push_async_callback(transport.close)
            self._view = View(
                run_name="",
                run_id=self._link.run.hex(),
                peer=identity.peer_id,
                device=config.device,
                began_s=time.monotonic(),
                transport=transport,
                addresses=await transport.addresses(),
                watch=TrainerWatch(self._log.tell),
                waiting_for="the run's manifest from its peers",
            )
            if on_ready is not None:
                await on_ready(self)
            working = asyncio.create_task(self._work(stack, identity, transport, signed), name="node work")
            return await self._until_end(working, transport)

    async def _until_end(self, working: asyncio.Task[None], transport: P2PTransport) -> int:
        stopping = asyncio.create_task(self._stopping.wait())
        failing = asyncio.create_task(transport.wait_failed())
        try:
            await asyncio.wait([working, stopping, failing], return_when=asyncio.FIRST_COMPLETED)
            if failing.done() and not stopping.done():
                raise failing.result()
            if working.done():
                working.result()
            return 0
        finally:
            for task in (working, stopping, failing):
                task.cancel()
            await asyncio.gather(working, stopping, failing, return_exceptions=True)

    def _network_options(self, signed: SignedRun | None) -> NetworkOptions:
        config = self._config
        run_config = RunConfig.from_json(signed.manifest.config) if signed is not None else None
        return NetworkOptions(
            identity_path=config.data_dir / IDENTITY_FILE,
            listen=config.listen,
            announce=config.announce,
            initial_peers=tuple(dict.fromkeys((*config.bootstrap, *self._link.bootstrap))),
            run=self._link.run,
            settings=flat_settings(run_config) if run_config is not None else {},
        )

    async def _work(
        self, stack: contextlib.AsyncExitStack, identity: Identity, transport: P2PTransport, signed: SignedRun | None
    ) -> None:
        async with contextlib.AsyncExitStack() as inner:
            signed, peers = await self._get_manifest(transport, signed)
            run_config = RunConfig.from_json(signed.manifest.config)
            transport.set_settings(flat_settings(run_config))
            seed = self._config.invite_seed or self._link.invite_seed
            check_admission(signed.manifest, run_config.protocol.admission, identity.peer_id, seed)
            if self._view is None or self._blobs is None:
                raise LocalStateError("the node has not started yet")
            self._view.run_name = run_config.name
            self._view.waiting_for = "the run's held-out set"
            await bring_held_out(signed.manifest, transport, peers)
            worker = Worker(self._hello(identity, run_config, signed), self._view.watch)
            inner.push_async_callback(worker.close)
            self._view.waiting_for, self._view.worker = "the trainer to read its text", worker
            ready = await worker.start()
            self._log.tell("info", f"{ready.num_documents} documents, {ready.num_bytes:,} bytes of text to train on")
            driver = await self._assemble(inner, identity, transport, signed, worker, ready.resumed_round)
            transport.set_message_handler(driver.receive)
            async with _background(self._watch_peers(transport, driver), self._watch_leave(driver)):
                await driver.run()

    async def _get_manifest(
        self, transport: P2PTransport, signed: SignedRun | None
    ) -> tuple[SignedRun, tuple[PeerId, ...]]:
        seeker = ManifestSeeker(self._link.run, transport)
        transport.set_message_handler(seeker.receive)
        if signed is not None:
            return signed, ()
        found = await seeker.seek(self._log.tell)
        save_manifest(self._config.data_dir, found)
        return found, seeker.peers

    def _hello(self, identity: Identity, run_config: RunConfig, signed: SignedRun) -> Hello:
        config = self._config
        return Hello(
            config=run_config.to_json(),
            peer=identity.peer_id,
            blobs_dir=str(config.data_dir / BLOBS_FOLDER),
            state_dir=str(config.data_dir / TRAINER_FOLDER),
            data=tuple(str(path) for path in config.data),
            held_out=signed.manifest.held_out,
            device=config.device,
            frozen_format=config.frozen_format,
            threads=config.threads,
        )

    async def _assemble(
        self,
        stack: contextlib.AsyncExitStack,
        identity: Identity,
        transport: P2PTransport,
        signed: SignedRun,
        worker: Worker,
        resumed_round: int | None,
    ) -> Driver:
        """The machine at the newest certificate of the ledger, and its shell."""
        data_dir, blobs, view = self._config.data_dir, self._blobs, self._view
        if blobs is None or view is None:
            raise LocalStateError("the node has not started yet")
        run_config = RunConfig.from_json(signed.manifest.config)
        journal = SqliteJournal(data_dir / JOURNAL_FILE)
        stack.callback(journal.close)
        ledger = Ledger(data_dir / LEDGER_FILE)
        stack.callback(ledger.close)
        head, certificate, resumed = _newest(
            ledger, genesis_head(signed.manifest, piece_sizes(run_config)), resumed_round
        )
        work = Work(run_config, blobs)
        stack.callback(work.close)
        keeper = Keeper(blobs, [signed.manifest.held_out], head.round)
        sync = StateSync(identity.peer_id, head, certificate, blobs, transport, ledger, keeper, self._log.tell)
        if resumed is not None:
            sync.resumed_from(resumed)
        training = Training(
            run_config, identity.peer_id, worker, ledger, signed.manifest.held_out_bytes, self._log.tell
        )
        machine = RoundMachine(
            head,
            identity,
            verify,
            self._wishes(identity, run_config),
            now_ms=self._clock.now_ms(),
            journal=journal.scan(),
        )
        tools = Tools(
            clock=self._clock,
            transport=transport,
            blobs=blobs,
            journal=journal,
            ledger=ledger,
            work=work,
            training=training,
            sync=sync,
            signed_run=signed,
            notify=self._log.tell,
            changed=self._log.changed,
        )
        driver = Driver(machine, tools)
        view.driver, view.sync = driver, sync
        self._driver, self._training = driver, training
        return driver

    def _wishes(self, identity: Identity, run_config: RunConfig) -> Wishes:
        seed = self._config.invite_seed or self._link.invite_seed
        invitation = b""
        if seed is not None:
            payload = invite_payload(self._link.run, identity.peer_id)
            invitation = Identity.from_seed(seed).sign("invite", payload)
        return Wishes(
            capacity=min(self._config.capacity or run_config.num_shards, run_config.num_shards),
            private_seed=digest("private recheck", identity.seed),
            invite_signature=invitation,
            stop_after_round=self._config.stop_after_round,
        )

    # --- beside the driver -------------------------------------------------------------------------------------------

    async def _watch_peers(self, transport: P2PTransport, driver: Driver) -> None:
        """Tell the machine which peers discovery knows, again and again."""
        while True:
            try:
                hints = await transport.discovery.find(self._link.run)
            except (OSError, EOFError, TimeoutError) as error:
                self._log.tell("warning", f"peers could not be looked up: {error!r}")
                hints = []
            peers = tuple(hint.peer for hint in hints if hint.peer != transport.peer_id)
            if peers:
                for hint in hints:
                    transport.add_peer(hint.peer, hint.addresses)
                driver.give(fx.PeersKnown(peers=peers))
                if self._view is not None and self._view.sync is not None:
                    self._view.sync.knows(peers)
            await asyncio.sleep(_FIND_EVERY_S)

    async def _watch_leave(self, driver: Driver) -> None:
        """On a wish to leave: let the training that is under way end, hand over, and say so."""
        await self._leave_wanted.wait()
        await driver.training_ended()
        training, blobs = self._training, self._blobs
        shards = {}
        if training is not None and driver.machine.is_member:
            try:
                shards = await training.export()
            except SpesError as error:
                self._log.tell("warning", f"nothing is handed over: {error}")
        if not shards or blobs is None:
            driver.give(fx.LeaveWanted(handover=None, handover_bytes=0))
            return
        index = encode_index(shards)
        blob = await asyncio.to_thread(blobs.put, index)
        driver.keep([blob, *(shard_blob for shard_blob, _ in shards.values())])
        driver.give(fx.LeaveWanted(handover=blob, handover_bytes=len(index)))


@contextlib.asynccontextmanager
async def _background(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _newest(ledger: Ledger, genesis: Head, resumed_round: int | None) -> tuple[Head, Certificate | None, Head | None]:
    """(newest head, its certificate, the head that the trainer's checkpoint starts from)."""
    head, certificate = genesis, None
    resumed = genesis if resumed_round == 1 else None
    for _, certificate, head in replay(ledger, genesis):  # noqa: B007 - the last one is used
        if resumed_round == head.round + 1:
            resumed = head
    return head, certificate, resumed


def flat_settings(config: RunConfig) -> Mapping[str, str]:
    """The run's configuration as flat text, compared at hello: what differs is named."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            found[prefix] = str(value)

    walk("", config.model_dump(mode="json"))
    return found


async def run_node(
    config: NodeConfig, link: InviteLink, *, on_ready: Callable[[NodeHandle], Awaitable[None]] | None = None
) -> int:
    """Run a node until it has left or was stopped; returns the exit code. Raises SpesError."""
    return await Node(config, link).run(on_ready)
