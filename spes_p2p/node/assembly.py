"""Putting the parts of a node together, from what is on its disk to its driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity, verify
from spes_p2p.ids import PeerId
from spes_p2p.node.catching_up import CatchUp, Surroundings
from spes_p2p.node.chain_source import ChainSource
from spes_p2p.node.driver import Driver, MessageTransport, Tools
from spes_p2p.node.fetching import Holdings
from spes_p2p.node.files import JOURNAL_FILE, LEDGER_FILE
from spes_p2p.node.holds import Holds
from spes_p2p.node.keeping import Keeper
from spes_p2p.node.mirrors import Mirrors
from spes_p2p.node.resume import Checkpoint, Resumption, resume
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.node.state_sync import StateSync
from spes_p2p.node.training import Requests, Training
from spes_p2p.node.verifying import Verification
from spes_p2p.node.work import Work
from spes_p2p.ports import Clock
from spes_p2p.protocol.head import genesis_head
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.round import RoundMachine, Wishes
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.journal import SqliteJournal
from spes_p2p.storage.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a node has once it knows its run and its trainer has its text."""

    data_dir: Path
    peer: PeerId
    signed: SignedRun
    blobs: DiskBlobs
    transport: MessageTransport
    trainer: Requests
    checkpoint: Checkpoint | None
    """Of the trainer; None: it has none."""
    clock: Clock
    notify: Callable[[str, str], None]
    """(level, text) for people."""
    changed: Callable[[], None]
    peers: tuple[PeerId, ...] = ()
    """Peers of the run that are known by now, besides the members."""
    entries: tuple[PeerId, ...] = ()
    """Bootstrap nodes: they may have certificates in their cache, and blobs in their mirror."""
    waiting: Callable[[str], None] = lambda text: None
    """What the start waits for, for people."""
    holds: Holds = field(default_factory=Holds)
    """Why training is held."""
    is_leaving: Callable[[], bool] = lambda: False
    """A leave was asked for."""


async def make_tools(stack: contextlib.AsyncExitStack, base: Base) -> Tools:
    """Journal, ledger, the newest certificate that peers can show, arithmetic and training; the stack closes them.
    Raises LocalStateError, MachineError."""
    manifest = base.signed.manifest
    config = RunConfig.from_json(manifest.config)
    journal = await asyncio.to_thread(SqliteJournal, base.data_dir / JOURNAL_FILE)
    stack.callback(journal.close)
    ledger = await asyncio.to_thread(Ledger, base.data_dir / LEDGER_FILE)
    stack.callback(ledger.close)
    genesis = genesis_head(manifest, piece_sizes(config))
    place = await asyncio.to_thread(resume, ledger, genesis, base.checkpoint, base.peer)
    source = ChainSource(ledger, genesis)
    stack.push_async_callback(source.close)
    base.transport.set_question_handler(source.answer)
    await _catch_up(place, base, ledger)
    await asyncio.to_thread(place.to_tip, ledger)
    work = Work(config, base.blobs)
    stack.push_async_callback(asyncio.to_thread, work.close)
    keeper = Keeper(base.blobs, [manifest.held_out])
    holdings = Holdings(blobs=base.blobs, fetcher=base.transport, keeper=keeper)
    mirrors = Mirrors(base.transport, base.entries, base.clock)
    return Tools(
        clock=base.clock,
        transport=base.transport,
        blobs=base.blobs,
        journal=journal,
        ledger=ledger,
        work=work,
        training=Training(config, base.peer, base.trainer, ledger, manifest.held_out_bytes, base.notify),
        sync=StateSync(base.peer, place.newest(), holdings, ledger, base.clock, base.notify, mirrors),
        signed_run=base.signed,
        notify=base.notify,
        changed=base.changed,
        holds=base.holds,
        is_leaving=base.is_leaving,
    )


async def _catch_up(place: Resumption, base: Base, ledger: Ledger) -> None:
    """Follow the chain as far as peers can show it."""
    verification = Verification(verify)
    try:
        around = Surroundings(
            ledger=ledger,
            transport=base.transport,
            verification=verification,
            clock=base.clock,
            notify=base.notify,
            waiting=base.waiting,
        )
        await CatchUp(place, around).run((*base.peers, *base.entries))
    finally:
        verification.close()


def make_driver(identity: Identity, wishes: Wishes, tools: Tools) -> Driver:
    """The round machine on top of the newest certificate, and its driver."""
    machine = RoundMachine(
        tools.sync.head,
        identity,
        verify,
        wishes,
        now_ms=tools.clock.now_ms(),
        journal=tools.journal.scan(),
    )
    return Driver(machine, tools)
