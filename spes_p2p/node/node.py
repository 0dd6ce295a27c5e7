"""A volunteer's node, from start to end: identity, network, manifest, trainer, machine.

    lock the data folder -> network -> manifest (disk, else peers) -> held-out set -> trainer -> state -> round machine

Everything that was begun is ended in reverse, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.config import NodeConfig, RunConfig
from spes_p2p.crypto import KEY_BYTES, Identity
from spes_p2p.digests import digest
from spes_p2p.errors import EXIT_INTERRUPTED, LocalStateError, MachineError
from spes_p2p.ids import PeerId
from spes_p2p.network.link import InviteLink
from spes_p2p.network.transport import NetworkOptions, P2PTransport
from spes_p2p.node.assembly import Base, make_driver, make_tools
from spes_p2p.node.budgets.keeper import Budgets
from spes_p2p.node.budgets.keeping_up import Demand, demand_of
from spes_p2p.node.budgets.pacing import PacedTrainer
from spes_p2p.node.budgets.power import GpuPower
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.contact import ContactWatch
from spes_p2p.node.control import NodeHandle
from spes_p2p.node.driver import Driver, Tools
from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, LEDGER_FILE, TRAINER_FOLDER
from spes_p2p.node.history import read_manifest
from spes_p2p.node.holds import PAUSE, Holds
from spes_p2p.node.joining import ManifestSeeker, bring_held_out, check_admission, find_peers, save_manifest
from spes_p2p.node.leaving import LeaveWish, leave_properly
from spes_p2p.node.log import LogBridge, NodeLog
from spes_p2p.node.machine import MachineWatch
from spes_p2p.node.pausing import PauseWish, paused_before_text, remember
from spes_p2p.node.recovery import read_recovery_key
from spes_p2p.node.resume import checkpoint_of, drop_damaged
from spes_p2p.node.snapshot import LimitsView, LogEvent, NodeSnapshot
from spes_p2p.node.view import TrainerWatch, View
from spes_p2p.node.worker import Worker
from spes_p2p.node.worker_messages import Hello, Ready
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import run_id
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import Wishes
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.storage.lock import FolderLock

_FIND_EVERY_S = 20.0
_FIND_AT_START_S = 5.0
"""For the peers whose tips are asked for before the round machine begins."""
_CONTACT_EVERY_S = 5.0
_RATE_SHARE = 10
"""A source of a blob serves others at the same time: a tenth of the run's minimum rate will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assembled:
    """What a node has before it knows its run."""

    identity: Identity
    blobs: DiskBlobs
    transport: P2PTransport
    view: View


class Node:
    """A running node. Satisfies `control.NodeHandle`."""

    def __init__(self, config: NodeConfig, link: InviteLink) -> None:
        self._config = config
        self._link = link
        self._clock = MonotonicClock()
        self._log = NodeLog()
        self._view: View | None = None
        self._stopping = asyncio.Event()
        self._wish = LeaveWish(config.data_dir)
        self._pause_wish = PauseWish(config.data_dir)
        self._holds = Holds(self._clock.now_ms)
        power = GpuPower((config.device, *config.more_devices))
        self._budgets = Budgets(config.data_dir, self.set_hold, self._log.tell, power)
        self._takes_part = False
        """There is something to leave: this node is, or may be, in the roster."""

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
        """Leave properly; remembered over a restart until it is done."""
        if self._wish.wanted.is_set():
            return
        self._log.tell("info", "leaving: this round is finished first" if self._takes_part else "leaving")
        try:
            self._wish.want()
        except MachineError as error:
            self._log.tell("warning", f"a restart would forget the wish to leave: {error}")

    def set_hold(self, reason: str, held: bool) -> None:
        """Hold training for a reason, or no longer for it; the user's own pause is remembered over a restart."""
        if reason == PAUSE:
            remember(self._pause_wish, held, self._log.tell)
        if held == (reason in self._holds.reasons):
            return
        self._holds.set(reason, held)
        self._log.tell("info", hold_text(self._holds, reason, held, self._view))

    def request_recovery(self) -> None:
        """Begin a new epoch with the members that are heard."""
        driver = self._view.driver if self._view is not None else None
        if driver is None:
            self._log.tell("error", "no recovery: this node has not begun its part in the run yet")
        else:
            self._log.tell("warning", "a recovery was asked for")
            driver.give(fx.RecoverWanted())

    async def change_limits(self, changes: Mapping[str, str]) -> LimitsView:
        """Change limits, now and over restarts. Raises ConfigError, MachineError, LocalStateError."""
        return await self._budgets.change(changes)

    def request_stop(self, *, keep_wish: bool = False) -> None:
        """End now. `keep_wish`: a leave that was asked for is completed at the next start."""
        if not keep_wish:
            self._wish.forget()
        self._stopping.set()

    def _trainer_pid(self) -> int | None:
        worker = self._view.worker if self._view is not None else None
        return worker.pid if worker is not None else None

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[NodeHandle], Awaitable[None]] | None) -> int:
        """Run until a leave is complete or a stop is asked for; returns 0 or 130. Raises SpesError."""
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(FolderLock(config.data_dir))
            bridge = LogBridge(self._log)
            logging.getLogger("spes_p2p").addHandler(bridge)
            stack.callback(logging.getLogger("spes_p2p").removeHandler, bridge)
            if self._pause_wish.is_stored:
                self._holds.set(PAUSE, True)
                self._log.tell("info", paused_before_text(leaving=self._wish.is_stored))
            identity = load_or_create_identity(config.data_dir / IDENTITY_FILE)
            signed = read_manifest(config.data_dir)
            if signed is not None and run_id(signed.manifest) != self._link.run:
                raise LocalStateError(
                    f"{config.data_dir} belongs to another run\nGive this run a folder of its own with --data-dir."
                )
            if signed is not None:
                is_founder = identity.peer_id in signed.manifest.founders
                self._takes_part = is_founder or (config.data_dir / LEDGER_FILE).exists()
            blobs = DiskBlobs(config.data_dir / BLOBS_FOLDER)
            stack.push_async_callback(self._budgets.close)
            await self._budgets.open(config.limits)
            transport = await P2PTransport.create(identity, blobs, self._network_options(signed))
            stack.push_async_callback(transport.close)
            await self._budgets.limit_line(transport)
            view = View(
                run_name="",
                run_id=self._link.run.hex(),
                peer=identity.peer_id,
                machine=MachineWatch((config.device, *config.more_devices), self._trainer_pid),
                began_s=time.monotonic(),
                transport=transport,
                addresses=await transport.addresses(),
                watch=TrainerWatch(self._log.tell),
                is_leaving=self._wish.wanted.is_set,
                wish=self._wish,
                holds=self._holds,
                limits=self._budgets.view,
                waiting_for="the run's manifest from its peers",
            )
            self._view = view
            if on_ready is not None:
                await on_ready(self)
            assembled = _Assembled(identity=identity, blobs=blobs, transport=transport, view=view)
            work = run_beside(
                self._work(assembled, signed), view.machine.watch(), transport.watch_routes(), self._budgets.run()
            )
            return await self._until_end(work, transport)

    async def _until_end(self, work: Coroutine[Any, Any, None], transport: P2PTransport) -> int:
        working = asyncio.create_task(work, name="node work")
        failing = asyncio.create_task(transport.wait_failed())
        ending = [asyncio.create_task(self._stopping.wait()), asyncio.create_task(self._left_before_it_began())]
        tasks = (working, failing, *ending)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_told = any(task.done() for task in ending)
            if working.done():
                working.result()
            elif failing.done() and not is_told:
                raise failing.result()
            return EXIT_INTERRUPTED if self._stopping.is_set() else 0
        finally:
            reported = working.done()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not reported and not working.cancelled() and (error := working.exception()) is not None:
                self._log.tell("error", f"while ending: {error}")

    async def _left_before_it_began(self) -> None:
        """Return on a wish to leave while there is nothing to leave."""
        await self._wish.wanted.wait()
        if self._takes_part:
            await asyncio.Event().wait()
        self._wish.forget()

    def _network_options(self, signed: SignedRun | None) -> NetworkOptions:
        config = self._config
        options = NetworkOptions(
            identity_path=config.data_dir / IDENTITY_FILE,
            listen=config.listen,
            announce=config.announce,
            initial_peers=tuple(dict.fromkeys((*config.bootstrap, *self._link.bootstrap))),
            run=self._link.run,
        )
        if signed is None:
            return options
        run_config = RunConfig.from_json(signed.manifest.config)
        return dataclasses.replace(
            options, settings=flat_settings(run_config), min_rate_bytes_per_s=min_source_rate(run_config)
        )

    async def _work(self, assembled: _Assembled, signed: SignedRun | None) -> None:
        """From the manifest to the end of the driver. Raises SpesError."""
        identity, transport, view = assembled.identity, assembled.transport, assembled.view
        async with contextlib.AsyncExitStack() as stack:
            signed, peers = await self._get_manifest(transport, signed)
            run_config = RunConfig.from_json(signed.manifest.config)
            transport.set_settings(flat_settings(run_config))
            transport.set_min_rate(min_source_rate(run_config))
            seed = self._config.invite_seed or self._link.invite_seed
            admission = run_config.protocol.admission
            check_admission(signed.manifest, admission, identity.peer_id, seed, self._link.permit)
            # only now does the folder belong to the run: one that refused this peer leaves nothing behind
            save_manifest(self._config.data_dir, signed)
            recovery = read_recovery_key(self._config.data_dir, signed.manifest)
            view.run_name = run_config.name
            view.waiting_for = "the blobs on disk to be checked"
            damaged = await asyncio.to_thread(drop_damaged, assembled.blobs)
            if damaged:
                self._log.tell("warning", f"{len(damaged)} damaged blobs were dropped: what is needed is fetched again")
            view.waiting_for = "the run's held-out set"
            await bring_held_out(signed.manifest, transport, peers, transport.entry_peers)
            worker = Worker(self._hello(identity, run_config, signed), view.watch)
            stack.push_async_callback(worker.close)
            self._budgets.limit_worker(worker)
            view.waiting_for, view.worker = "the trainer to read its text", worker
            ready = await worker.start()
            self._log.tell("info", text_found(ready))
            self._log.tell("info", ready.memory)
            if ready.damaged:
                self._log.tell("warning", f"the trainer begins from an older state: {ready.damaged}")
            view.waiting_for = "the certificates on disk to be read"
            peers = peers or await self._known_peers(transport)

            def waiting(text: str) -> None:
                view.waiting_for = text
                self._log.changed()

            base = Base(
                data_dir=self._config.data_dir,
                peer=identity.peer_id,
                signed=signed,
                blobs=assembled.blobs,
                transport=transport,
                trainer=PacedTrainer(worker, self._budgets),
                checkpoint=checkpoint_of(ready),
                clock=self._clock,
                notify=self._log.tell,
                changed=self._log.changed,
                peers=peers,
                entries=transport.entry_peers,
                waiting=waiting,
                holds=self._holds,
                is_leaving=self._wish.wanted.is_set,
            )
            tools = await make_tools(stack, base)
            capacity = self._fit_line(tools.sync.head, identity.peer_id, ready.capacity)
            wishes = dataclasses.replace(self._wishes(identity, capacity), recovery=recovery)
            driver = make_driver(identity, wishes, tools)
            self._follow_line(driver, identity.peer_id)
            self._takes_part = True
            view.driver, view.sync, view.holds_recovery_key = driver, tools.sync, recovery is not None
            stack.callback(driver.close)
            if self._has_left_before(driver):
                return
            transport.set_message_handler(driver.receive)
            await run_beside(
                driver.run(),
                self._watch_peers(transport, driver),
                self._watch_contact(driver, identity.peer_id),
                self._watch_leave(driver, tools),
            )
            self._wish.forget()

    async def _get_manifest(
        self, transport: P2PTransport, signed: SignedRun | None
    ) -> tuple[SignedRun, tuple[PeerId, ...]]:
        seeker = ManifestSeeker(self._link.run, transport, entries=transport.entry_peers)
        transport.set_message_handler(seeker.receive)
        if signed is not None:
            return signed, ()
        return await seeker.seek(self._log.tell), seeker.peers

    async def _known_peers(self, transport: P2PTransport) -> tuple[PeerId, ...]:
        """Peers of the run that discovery finds at once."""
        try:
            async with asyncio.timeout(_FIND_AT_START_S):
                hints = await find_peers(transport.discovery, self._link.run, transport.peer_id, self._log.tell)
        except TimeoutError:
            return ()  # members whose addresses are known are asked all the same
        for hint in hints:
            transport.add_peer(hint.peer, hint.addresses)
        return tuple(hint.peer for hint in hints)

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
            more_devices=config.more_devices,
            frozen_format=config.frozen_format,
            moments=config.moments,
            threads=config.threads,
            memory_bytes=config.memory_bytes,
            compile=config.compile,
            capacity=config.capacity,
        )

    def _wishes(self, identity: Identity, capacity: int) -> Wishes:
        seed = self._config.invite_seed or self._link.invite_seed
        invitation, permit = b"", self._link.permit or b""
        if seed is not None:
            payload = invite_payload(self._link.run, identity.peer_id)
            invitation = Identity.from_seed(seed).sign("invite", payload)
        return Wishes(
            capacity=capacity,
            private_seed=digest("private recheck", identity.seed),
            invite_signature=invitation,
            sponsor=permit[:KEY_BYTES],
            sponsor_signature=permit[KEY_BYTES:],
            stop_after_round=self._config.stop_after_round,
        )

    def _fit_line(self, head: Head, me: PeerId, capacity: int) -> int:
        """Shards to offer, so that a line with limits keeps up. Raises MachineError if it cannot."""
        demand = demand_of(Terms(head), is_member=me in head.state.members)
        return self._budgets.fit_run(demand, capacity, stated=self._config.capacity is not None)

    def _follow_line(self, driver: Driver, me: PeerId) -> None:
        """Let the budgets know what the run asks of the line, round after round."""
        machine = driver.machine

        def demand() -> tuple[Demand, int]:
            asked, round_ms = demand_of(machine.terms, is_member=machine.is_member), driver.pace.round_ms
            asked = dataclasses.replace(asked, round_s=None if round_ms is None else round_ms / 1000)
            return asked, len(machine.head.state.shards_of(me))

        self._budgets.follow_run(demand)

    # --- beside the driver -------------------------------------------------------------------------------------------

    async def _watch_peers(self, transport: P2PTransport, driver: Driver) -> None:
        """Tell the machine which peers discovery knows, again and again."""
        while True:
            hints = await find_peers(transport.discovery, self._link.run, transport.peer_id, self._log.tell)
            if hints:
                for hint in hints:
                    transport.add_peer(hint.peer, hint.addresses)
                driver.peers_known(tuple(hint.peer for hint in hints))
            await asyncio.sleep(_FIND_EVERY_S)

    async def _watch_contact(self, driver: Driver, me: PeerId) -> None:
        """Say so when no member is within reach. Raises UnreachableError if that lasts and this node is none."""
        watch = ContactWatch(self._log.tell)
        while True:
            await asyncio.sleep(_CONTACT_EVERY_S)
            machine = driver.machine
            num_others = len(set(machine.terms.members) - {me})
            silent_ms = self._clock.now_ms() - driver.heard_at_ms
            watch.judge(silent_ms, is_member=machine.is_member, num_others=num_others)

    def _has_left_before(self, driver: Driver) -> bool:
        """Go on with a leave that was asked for before a restart. True: it is done, and this node ends with it."""
        if not self._wish.is_stored:
            return False
        if driver.machine.is_member:
            self._log.tell("info", "a leave was asked for before this start: it is completed first")
            self._wish.wanted.set()
            return False
        self._wish.forget()
        self._log.tell("info", "the leave that was asked for before this start is done; join again to take part")
        return True

    async def _watch_leave(self, driver: Driver, tools: Tools) -> None:
        await self._wish.wanted.wait()
        training, blobs = tools.training, tools.blobs
        await leave_properly(driver, training, blobs, self._log.tell, self._wish, self._budgets)


async def run_beside(main: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, and the others beside it; they are cancelled then. The first that raises ends them all."""
    tasks = [asyncio.create_task(work) for work in (main, *beside)]
    open_tasks = set(tasks)
    try:
        while not tasks[0].done():
            done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def hold_text(holds: Holds, reason: str, held: bool, view: View | None) -> str:
    """That training is held now for one more reason, or for one less, for people."""
    if not held:
        more = f"; it is still held: {', '.join(holds.reasons)}" if holds.held else "; training goes on"
        return f"no longer held: {reason}{more}"
    pause = view.driver.pause() if view is not None and view.driver is not None else None
    return f"training is held: {reason}" + (f"; {pause.reason}" if pause is not None and pause.reason else "")


def text_found(ready: Ready) -> str:
    """What the trainer trains on, for people."""
    words = f"{ready.num_documents} documents, {ready.num_bytes:,} bytes of text to train on"
    if ready.bounded:
        words += ", a sample of what there is"
    if ready.num_held_out:
        words += f"; {ready.num_held_out} left out because they are in the run's held-out set"
    return words


def min_source_rate(config: RunConfig) -> int:
    """Bytes per second below which a source of a blob is left for another one."""
    return max(1, config.protocol.min_rate_bytes_per_s // _RATE_SHARE)


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
