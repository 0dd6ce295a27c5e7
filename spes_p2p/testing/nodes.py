"""`NodeSwarm`: whole nodes in one process, apart from the network and the trainer process.

Machine, driver, arithmetic, store, journal, ledger and training are the real ones, on disk; messages and blobs go
through a `MemoryNetwork`, and the trainer is the real one in a thread instead of a process. Waits end when a condition
holds.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import TypeVar

from spes_p2p.config import RunConfig
from spes_p2p.crypto import Identity
from spes_p2p.errors import SpesError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.network.link import InviteLink
from spes_p2p.node.assembly import Base, make_driver, make_tools
from spes_p2p.node.clock import MonotonicClock
from spes_p2p.node.create import create_run
from spes_p2p.node.driver import Driver, Tools
from spes_p2p.node.files import BLOBS_FOLDER, IDENTITY_FILE, MANIFEST_FILE, TRAINER_FOLDER
from spes_p2p.node.history import read_manifest
from spes_p2p.node.recovery import read_recovery_key
from spes_p2p.node.resume import checkpoint_of, drop_damaged
from spes_p2p.node.stored import LAST_ROUND
from spes_p2p.node.trainer_service import TrainerService
from spes_p2p.node.worker_messages import (
    ExportHandover,
    HandoverExported,
    HandoverImported,
    Hello,
    ImportHandover,
    LoadStart,
    Publish,
    Published,
    Ready,
    Reply,
    Request,
    Started,
    Train,
    Trained,
)
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.protocol.round import Wishes
from spes_p2p.storage.blobs import DiskBlobs
from spes_p2p.storage.identity import load_or_create_identity
from spes_p2p.testing.network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.training import tiny_run

ReplyType = TypeVar("ReplyType")

WAIT_S = 120.0
_TEXT_BYTES = 20_000


def swift_run(**protocol: object) -> RunConfig:
    """A tiny run whose rounds take a second."""
    times: dict[str, object] = {
        "round_max_ms": 20_000,
        "round_min_ms": 0,
        "train_grace_ms": 2_000,
        "min_rate_bytes_per_s": 5_000_000,
        "view_timeout_base_ms": 3_000,
        "view_timeout_step_ms": 1_000,
        "resend_ms": 300,
        "parts": 3,
    }
    return tiny_run(protocol=times | protocol, held_out_bytes=2_048)


def patient_run(**protocol: object) -> RunConfig:
    """The same with times that let a busy machine finish every step and every receipt: no update comes too late."""
    times: dict[str, object] = {"round_max_ms": 60_000, "train_grace_ms": 20_000, "min_rate_bytes_per_s": 5_000}
    return swift_run(**(times | protocol))


class TrainerInThread:
    """Satisfies `training.Requests` with the trainer itself, one request at a time. `fail_next` scripts its failures:
    the next request of that type raises the error instead of being answered."""

    def __init__(self, hello: Hello) -> None:
        self._service = TrainerService(hello)
        self._lock = asyncio.Lock()
        self._stop_wanted = False
        self.fail_next: dict[type[Request], SpesError] = {}
        self.trained_rounds: list[int] = []
        """Rounds whose training has begun."""
        self._round = 0
        self.loads: list[LoadStart] = []
        self.residuals: list[float] = []
        """Largest residual after each of `loads`."""

    @property
    def ready(self) -> Ready:
        """What the trainer found at its start."""
        return self._service.ready

    async def _ask(self, request: Request) -> Reply:
        async with self._lock:
            error = self.fail_next.pop(type(request), None)
            if error is not None:
                raise error
            return await asyncio.to_thread(
                self._service.handle, request, lambda: self._stop_wanted, lambda progress: None
            )

    async def load_start(self, request: LoadStart) -> Started:
        """Load the start of a round."""
        started = _expect(await self._ask(request), Started)
        self._round = started.round
        self.loads.append(request)
        self.residuals.append(float(abs(self._service.own_work.residual).max()))
        return started

    async def train(self, num_inner_steps: int) -> Trained:
        """Make inner steps."""
        self._stop_wanted = False
        self.trained_rounds.append(self._round)
        return _expect(await self._ask(Train(num_inner_steps=num_inner_steps)), Trained)

    def stop_training(self) -> None:
        """End the training that is awaited."""
        self._stop_wanted = True

    async def publish(self) -> Published:
        """Store the update."""
        return _expect(await self._ask(Publish()), Published)

    async def export_handover(self, shard: int) -> HandoverExported:
        """Store masters and moments."""
        return _expect(await self._ask(ExportHandover(shard=shard)), HandoverExported)

    async def import_handover(self, shard: int, blob: Digest) -> HandoverImported:
        """Take over a shard."""
        return _expect(await self._ask(ImportHandover(shard=shard, blob=blob)), HandoverImported)


class SwarmNode:
    """One node that runs, or ran."""

    def __init__(self, name: str, driver: Driver, trainer: TrainerInThread, tools: Tools, notes: list[str]) -> None:
        self.name = name
        self.driver = driver
        self.trainer = trainer
        self.tools = tools
        self.notes = notes
        self.running = asyncio.create_task(driver.run(), name=name)

    @property
    def round(self) -> int:
        """Newest certified round in the ledger. The machine itself is ahead of it while a certificate is stored."""
        return self.tools.sync.head.round

    def history(self) -> dict[int, str]:
        """Hash of the body of every certified round in the ledger, psi digest and tables included."""
        return {entry.round: entry.hash.hex() for entry in self.tools.ledger.range(RoundNumber(1), LAST_ROUND)}


class NodeSwarm:
    """The nodes of one run, by name, under one folder."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        self.network = MemoryNetwork(Random(7))
        self.nodes: dict[str, SwarmNode] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._link: InviteLink | None = None
        self._changed = asyncio.Event()

    def data_dir(self, name: str) -> Path:
        """Data folder of a node."""
        return self.folder / name

    def identity(self, name: str) -> Identity:
        """Its key, made on first use."""
        self.data_dir(name).mkdir(parents=True, exist_ok=True)
        return load_or_create_identity(self.data_dir(name) / IDENTITY_FILE)

    def create(self, founders: list[str]) -> None:
        """Create the run, by the first of the founders."""
        others = [self.identity(name).peer_id for name in founders[1:]]
        documents = [self._text(name).read_bytes()[at : at + 400] for name in founders for at in range(0, 8_000, 400)]
        self._link = create_run(self.config, self.data_dir(founders[0]), founders=others, documents=documents)
        for name in founders[1:]:
            self._give_manifest(founders[0], name)

    def _give_manifest(self, giver: str, name: str) -> None:
        self.identity(name)
        shutil.copy(self.data_dir(giver) / MANIFEST_FILE, self.data_dir(name) / MANIFEST_FILE)

    def _text(self, name: str) -> Path:
        path = self.folder / f"{name}.txt"
        if not path.exists():
            random = Random(name)
            words = [bytes(random.choices(b"abcdefghij", k=random.randint(2, 9))) for _ in range(200)]
            path.write_bytes(b" ".join(random.choices(words, k=_TEXT_BYTES // 6)))
        return path

    def _changed_now(self) -> None:
        self._changed.set()

    async def start(self, name: str, *, manifest_from: str | None = None, capacity: int = 4) -> SwarmNode:
        """Start a node, for the first time or again."""
        if manifest_from is not None:
            self._give_manifest(manifest_from, name)
        signed = read_manifest(self.data_dir(name))
        if signed is None:
            raise SpesError(f"{name} has no manifest")
        stack = self._stacks[name] = AsyncExitStack()
        notes: list[str] = []
        identity, folder = self.identity(name), self.data_dir(name)
        blobs = DiskBlobs(folder / BLOBS_FOLDER)
        notes += [f"{blob.hex()} was damaged" for blob in drop_damaged(blobs)]
        transport = MemoryTransport(self.network, identity.peer_id, blobs)
        stack.push_async_callback(transport.close)
        sources = [self.identity(other).peer_id for other in self.nodes] + list(signed.manifest.founders)
        await transport.fetch(signed.manifest.held_out, sources)
        trainer = await asyncio.to_thread(TrainerInThread, self._hello(name, identity, signed))

        def notify(level: str, text: str) -> None:
            notes.append(text)
            self._changed_now()

        base = Base(
            data_dir=folder,
            peer=identity.peer_id,
            signed=signed,
            blobs=blobs,
            transport=transport,
            trainer=trainer,
            checkpoint=checkpoint_of(trainer.ready),
            clock=MonotonicClock(),
            notify=notify,
            changed=self._changed_now,
        )
        tools = await make_tools(stack, base)
        wishes = Wishes(
            capacity=capacity,
            private_seed=identity.seed,
            invite_signature=self._invitation(identity),
            recovery=read_recovery_key(folder, signed.manifest),
        )
        driver = make_driver(identity, wishes, tools)
        transport.set_message_handler(driver.receive)
        node = self.nodes[name] = SwarmNode(name, driver, trainer, tools, notes)
        node.running.add_done_callback(lambda task: self._changed_now())
        stack.callback(driver.close)
        stack.push_async_callback(_end, node.running)
        return node

    def _hello(self, name: str, identity: Identity, signed: SignedRun) -> Hello:
        folder = self.data_dir(name)
        return Hello(
            config=self.config.to_json(),
            peer=identity.peer_id,
            blobs_dir=str(folder / BLOBS_FOLDER),
            state_dir=str(folder / TRAINER_FOLDER),
            data=(str(self._text(name)),),
            held_out=signed.manifest.held_out,
        )

    def _invitation(self, identity: Identity) -> bytes:
        if self._link is None or self._link.invite_seed is None:
            return b""
        payload = invite_payload(self._link.run, identity.peer_id)
        return Identity.from_seed(self._link.invite_seed).sign("invite", payload)

    def introduce(self) -> None:
        """Let every node know all others, as discovery would."""
        running = [node for node in self.nodes.values() if not node.running.done()]
        for node in running:
            node.driver.peers_known(tuple(self.identity(other.name).peer_id for other in running if other is not node))

    def cut(self, *islands: list[str]) -> None:
        """Cut all lines between these groups of nodes."""
        self.network.partition(*([self.identity(name).peer_id for name in names] for names in islands))

    async def kill(self, name: str) -> None:
        """End a node without a word."""
        await self._stacks.pop(name).aclose()

    async def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Return once the condition holds. Raises what a node died of; SpesError after two minutes."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self._changed.clear()
                    for node in self.nodes.values():
                        if node.running.done() and not node.running.cancelled():
                            node.running.result()
                    await self._changed.wait()
        except TimeoutError as error:
            told = {name: (node.round, node.notes[-3:]) for name, node in self.nodes.items()}
            raise SpesError(f"no {what} within {WAIT_S:.0f} s: {told}") from error

    async def wait_round(self, number: int, names: list[str] | None = None) -> None:
        """Until these nodes (default: all that run) have adopted that round."""

        def there() -> bool:
            chosen = [self.nodes[name] for name in names] if names is not None else list(self.nodes.values())
            return all(node.round >= number for node in chosen if names is not None or not node.running.done())

        await self.wait(there, f"round {number}")

    async def close(self) -> None:
        """End all nodes."""
        for name in list(self._stacks):
            await self.kill(name)


async def _end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _expect(reply: Reply, reply_type: type[ReplyType]) -> ReplyType:
    if not isinstance(reply, reply_type):
        raise SpesError(f"the trainer answered {type(reply).__name__}")
    return reply


@asynccontextmanager
async def node_swarm(folder: Path, config: RunConfig | None = None) -> AsyncIterator[NodeSwarm]:
    """A swarm whose nodes have ended when the context closes."""
    swarm = NodeSwarm(folder, config or swift_run())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield swarm
    finally:
        await swarm.close()
