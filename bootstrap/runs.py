"""The runs that a bootstrap node knows: who of its visitors takes part in which, and what it keeps of each.

    a visitor's hello names its run -> its manifest is asked for, whose hash is the run id -> its chain is followed

A newcomer asks the bootstrap node as it asks members, for the manifest by a `TipAsk` of round 0 and for certificates by
questions, and verifies what it gets in the same way. Which run is meant follows from the asker's hello. Anybody may
name any run, so what is kept is bounded: the runs that nobody visits make room for new ones, oldest first.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.bootstrap.chains import Chain, Following, short_run
from spes_p2p.bootstrap.mirror import Mirror
from spes_p2p.errors import IdentityError, LocalStateError, MachineError, TransportError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.discovery import Discovery
from spes_p2p.protocol.codec import decode, decode_signed_run, encode, run_id
from spes_p2p.protocol.messages import SignedRun, TipAsk
from spes_p2p.protocol.questions import decode_question

MAX_RUNS = 32
FOLLOW_EVERY_S = 10.0
LOOK_EVERY_S = 1.0
MAX_ASKED = 8
"""Visitors of a run that are asked at a time."""
_FIND_EVERY = 6
"""Members that are no visitors are looked up once in so many times that a run is followed."""
_NUM_HURRIED = 20
"""So many times a run that is new here is followed at every look."""

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What is needed of the transport."""

    discovery: Discovery

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        ...

    @property
    def visitors(self) -> Mapping[PeerId, RunId | None]:
        """Who has a channel to this node, and the run that each names."""
        ...

    def add_peer(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Say where a peer can be reached."""
        ...

    async def send(self, peer: PeerId, data: bytes) -> None:
        """Deliver one message. Raises TransportError, IdentityError."""
        ...

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """A peer's answer. Raises TransportError, RemoteProtocolError."""
        ...


class Runs:
    """Satisfies `ports.MessageHandler` by `receive` and `ports.QuestionHandler` by `answer`."""

    def __init__(self, folder: Path, host: Host, following: Following, mirror: Mirror) -> None:
        self._folder = folder
        self._host = host
        self._following = following
        self._mirror = mirror
        self._chains: dict[RunId, Chain] = {}
        """The run that was visited last at the end."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._complaints: dict[RunId, str] = {}
        self._followed: dict[RunId, tuple[int, float]] = {}
        """Runs that are visited: how often each was followed, and when it is due again on the loop's clock."""
        self._bug: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @property
    def chains(self) -> Mapping[RunId, Chain]:
        """What is kept, by run."""
        return self._chains

    async def load(self) -> None:
        """Take up what an earlier start has kept; what is damaged is deleted, since the members have it.

        Raises MachineError if the disk refuses.
        """
        folders = sorted(self._folder.glob("*/"), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[-MAX_RUNS:]:
            try:
                chain = await asyncio.to_thread(Chain.load, folder, self._following)
            except LocalStateError as error:
                logger.warning("%s; it is fetched again", str(error).splitlines()[0])
                await asyncio.to_thread(_delete, folder)
                continue
            self._chains[chain.run] = chain
        for folder in folders[:-MAX_RUNS]:
            await asyncio.to_thread(_delete, folder)
        await self._mirror.begin({run: chain.blobs() for run, chain in self._chains.items()})

    async def receive(self, sender: PeerId, data: bytes) -> None:
        """A message. Only two kinds mean something here; members send others to whom they take for one of them."""
        message = decode(data, sender)
        run = self._host.visitors.get(sender)
        if isinstance(message, SignedRun):
            signed = decode_signed_run(data, sender)
            if run is not None and run_id(signed.manifest) == run and run not in self._chains:
                await self._adopt(run, signed)
        elif isinstance(message, TipAsk) and message.round == 0 and run is not None and run in self._chains:
            # not here: the asker waits for its message to be taken before it takes ours
            self._start(f"manifest for {sender.hex()}", partial(self._send, sender, self._chains[run].manifest))

    async def answer(self, asker: PeerId, question: bytes) -> Sequence[bytes]:
        """A question about the chain of the asker's run; no frames if this node has nothing of it."""
        decode_question(question, asker)
        chain = self._chains.get(self._host.visitors.get(asker) or RunId(b""))
        if chain is None:
            return ()
        try:
            return await chain.answer(asker, question)
        except LocalStateError as error:
            await self._drop(chain, str(error))
            return ()

    async def keep_following(self) -> None:
        """Follow the chains of all runs that are visited. Returns never; raises what is a bug."""
        while True:
            visited: dict[RunId, list[PeerId]] = {}
            for peer, run in self._host.visitors.items():
                if run is not None:
                    visited.setdefault(run, []).append(peer)
            self._followed = {run: self._followed.get(run, (0, 0.0)) for run in visited}
            for run, peers in visited.items():
                self._follow_if_due(run, tuple(peers[:MAX_ASKED]))
            await asyncio.wait([self._bug], timeout=LOOK_EVERY_S)
            if self._bug.done():
                raise self._bug.result()

    def _follow_if_due(self, run: RunId, peers: tuple[PeerId, ...]) -> None:
        times, due_s = self._followed[run]
        chain = self._chains.pop(run, None)
        if chain is not None:
            self._chains[run] = chain  # visited last
        is_new = (chain is None or not chain.num_certificates) and times < _NUM_HURRIED
        now_s = asyncio.get_running_loop().time()
        if is_new or now_s >= due_s:
            self._followed[run] = times + 1, now_s + FOLLOW_EVERY_S
            self._start(_name(run), partial(self._follow, run, peers))

    async def close(self) -> None:
        """Stop all of it."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for chain in self._chains.values():
            await chain.close()

    # --- one run -----------------------------------------------------------------------------------------------------

    async def _follow(self, run: RunId, peers: Sequence[PeerId]) -> None:
        """Ask for the manifest, or for what is new of the chain and, if there is a mirror, of the blobs."""
        if self._followed.get(run, (1, 0.0))[0] % _FIND_EVERY == 1:
            await self._find_members(run)
        chain = self._chains.get(run)
        if chain is None:
            for peer in peers:
                await self._send(peer, encode(TipAsk(0, 0)))
            return
        try:
            await chain.follow(peers)
            members = [peer for peer in chain.head.state.members if peer != self._host.peer_id]
            await self._mirror.follow(run, chain.blobs(), tuple(dict.fromkeys((*peers, *members))))
        except LocalStateError as error:
            await self._drop(chain, str(error))
        except MachineError as error:
            self._complain(run, str(error))
        else:
            self._complaints.pop(run, None)

    async def _find_members(self, run: RunId) -> None:
        try:
            hints = await self._host.discovery.find(run)
        except (OSError, EOFError, TimeoutError) as error:
            logger.info("members of run %s could not be looked up: %r", short_run(run), error)
            return
        for hint in hints:
            self._host.add_peer(hint.peer, hint.addresses)

    async def _send(self, peer: PeerId, data: bytes) -> None:
        try:
            await self._host.send(peer, data)
        except (TransportError, IdentityError) as error:
            logger.debug("not sent: %s", error)

    async def _adopt(self, run: RunId, signed: SignedRun) -> None:
        """Begin to keep a run, if there is room."""
        if not await self._make_room():
            self._complain(run, f"{MAX_RUNS} runs are visited already: the manifest of another one is not kept")
            return
        folder = self._folder / run.hex()
        try:
            chain = await asyncio.to_thread(Chain, folder, signed, self._following)
        except (LocalStateError, MachineError) as error:
            self._complain(run, str(error))
            await asyncio.to_thread(_delete, folder)
            return
        if run in self._chains:  # somebody else's copy was faster
            await chain.close()
            return
        self._chains[run] = chain
        logger.info("run %s: its manifest is here", short_run(run))

    async def _make_room(self) -> bool:
        if len(self._chains) < MAX_RUNS:
            return True
        visited = set(self._host.visitors.values())
        idle = next((chain for run, chain in self._chains.items() if run not in visited), None)
        if idle is not None:
            await self._drop(idle, "nobody visits it, and another run needs the place")
        return idle is not None

    async def _drop(self, chain: Chain, reason: str) -> None:
        logger.warning("run %s is dropped from the cache: %s", short_run(chain.run), reason.splitlines()[0])
        if self._chains.get(chain.run) is chain:
            del self._chains[chain.run]
        following = self._tasks.get(_name(chain.run))
        if following is not None and following is not asyncio.current_task():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await chain.delete()
        await self._mirror.drop(chain.run)

    def _complain(self, run: RunId, problem: str) -> None:
        """Once for each problem, not at every pass."""
        if self._complaints.get(run) != problem:
            if len(self._complaints) > 2 * MAX_RUNS:
                self._complaints.clear()
            self._complaints[run] = problem
            logger.warning("run %s: %s", short_run(run), problem.splitlines()[0])

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a task unless the one of that name still runs. A bug in it ends this node."""
        if name in self._tasks:
            return
        task = asyncio.create_task(work(), name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (bug := task.exception()) is not None and not self._bug.done():
            self._bug.set_result(bug)


def _name(run: RunId) -> str:
    """Of the task that follows a run."""
    return f"run {run.hex()}"


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
