"""Following the chain to its tip before the round machine begins (docs/protocol.md, section 8).

    ask at least 3 peers for their tips -> the highest claim -> whole chain, or skip -> ask again, until nobody is ahead

Only what was verified is stored, batch by batch, so a node that is killed goes on where it was. A peer whose claim
proves to be a lie, or that has gone, is named and left; the next highest claim is followed then. What is certified
afterwards is the round machine's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.crypto import peer_text
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError, TransportError
from spes_p2p.ids import PeerId, RoundNumber
from spes_p2p.node.resume import Resumption
from spes_p2p.node.stored import entry_of, tables_of
from spes_p2p.node.verifying import Verification
from spes_p2p.ports import Clock
from spes_p2p.protocol.chain import Link, links
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.questions import (
    MAX_CERTIFICATES,
    Answer,
    CertificatesQuestion,
    Question,
    Tables,
    TablesQuestion,
    Tip,
    TipQuestion,
    Waypoint,
    WaypointQuestion,
    decode_answer,
)
from spes_p2p.protocol.skip import Skipping, anchor_of, head_at
from spes_p2p.protocol.tips import Tips
from spes_p2p.storage.ledger import Gap, Ledger

NUM_ASKED = 3
"""So many peers have to name their tips, if there are as many."""
MAX_ASKED = 16
TIP_TIMEOUT_MS = 5_000
"""For the tips of all; what has come by then counts."""
MORE_TIPS_MS = 500
"""For further ones once there are enough."""
SHORT_GAP = 8
"""Rounds that the machine may as well follow by itself."""
SKIP_ROUNDS = 1_000
"""A longer way is skipped: 16 MB and some seconds at 64 voters."""
_MAX_PASSES = 8
_SLOW_MS = 10_000
"""A peer that takes longer for an answer is asked last from then on."""
_TELL_EVERY_MS = 5_000


class Asker(Protocol):
    """What catching up needs of the transport."""

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        ...

    async def ask(self, peer: PeerId, question: bytes) -> tuple[bytes, ...]:
        """A peer's answer. Raises TransportError, RemoteProtocolError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What catching up works with."""

    ledger: Ledger
    transport: Asker
    verification: Verification
    clock: Clock
    notify: Callable[[str, str], None]
    """(level, text) for people."""
    waiting: Callable[[str], None]
    """What the start of the node waits for, for people; called often."""
    skip_rounds: int = SKIP_ROUNDS


class _LieError(Exception):
    """A peer gave what an honest one would not give."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.reason = reason


@contextmanager
def _blaming(peer: PeerId, tip: Tip) -> Iterator[None]:
    """Whatever is wrong with what comes in the block is this peer's lie, whoever signed it."""
    try:
        yield
    except RemoteProtocolError as error:
        raise _LieError(peer, f"on the way to round {tip.round:,}, {error.reason}") from error


class CatchUp:
    """Moves a node's place in the chain, and its ledger, to the highest certificate that its peers can show."""

    def __init__(self, place: Resumption, around: Surroundings) -> None:
        self._place = place
        self._around = around
        self._told_at_ms: int | None = None
        self.num_followed = 0
        """Certificates verified one by one."""

    async def run(self, peers: Sequence[PeerId]) -> None:
        """Ask and follow until nobody is more than a short gap ahead. Raises LocalStateError, MachineError."""
        for _ in range(_MAX_PASSES):
            begin = self._place.head.round
            tips = await self._ask_tips(peers)
            if tips.highest() <= begin:
                break
            await self._approach(tips)
            if self._place.head.round == begin or tips.highest() <= begin + SHORT_GAP:
                break
        if self._told_at_ms is not None:
            self._around.notify("info", f"the chain is checked up to round {self._place.head.round:,}")

    # --- tips --------------------------------------------------------------------------------------------------------

    async def _ask_tips(self, peers: Sequence[PeerId]) -> Tips:
        """The tips of at least NUM_ASKED peers, of all if they are fewer; of those that answer in time."""
        claims: dict[PeerId, Tip] = {}
        asking = {asyncio.create_task(self._ask_tip(peer, claims)) for peer in self._whom_to_ask(peers)}
        now_ms = self._around.clock.now_ms
        deadline_ms, had_enough = now_ms() + TIP_TIMEOUT_MS, False
        try:
            while asking and (left_ms := deadline_ms - now_ms()) > 0:
                done, asking = await asyncio.wait(asking, timeout=left_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if len(claims) >= NUM_ASKED and not had_enough:
                    had_enough, deadline_ms = True, min(deadline_ms, now_ms() + MORE_TIPS_MS)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return Tips(claims)

    def _whom_to_ask(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """Members as far as they are known, and others, in an order of this node's own: nobody can come first by making
        himself a small peer id."""
        me, members = self._around.transport.peer_id, set(self._place.head.state.members)
        order = sorted({*peers, *members} - {me}, key=lambda peer: digest("spes tip order", me, peer))
        known = [peer for peer in order if peer in members][: MAX_ASKED // 2]
        return known + [peer for peer in order if peer not in members][: MAX_ASKED - len(known)]

    async def _ask_tip(self, peer: PeerId, claims: dict[PeerId, Tip]) -> None:
        try:
            answer = await self._ask_one(peer, TipQuestion())
            if isinstance(answer, Tip) and answer.epoch >= self._place.head.epoch:
                claims[peer] = answer
        except TransportError:
            return
        except RemoteProtocolError as error:
            self._name(peer, error.reason)

    async def _approach(self, tips: Tips) -> None:
        """Follow the claims, the best first, until none of them is ahead any more."""
        while (choice := tips.best(self._place.head.round)) is not None:
            peer, tip = choice
            head = self._place.head
            far = tip.round - head.round > self._around.skip_rounds or tip.first > head.round + 1
            try:
                if not far or tip.epoch > head.epoch or not await self._skip(peer, tip, tips):
                    await self._follow(peer, tip, tips)
            except _LieError as lie:
                self._name(lie.peer, lie.reason)
                tips.drop(lie.peer, lie.reason)
            except TransportError as error:
                self._around.notify("info", f"another peer is asked for the chain: {error}")
                tips.drop(peer, str(error))
            # what a peer has shown after the last final certificate may be a branch that leads nowhere
            self._place.rewind()

    # --- the whole chain ---------------------------------------------------------------------------------------------

    async def _follow(self, peer: PeerId, tip: Tip, tips: Tips) -> None:
        """Load and verify certificates of one peer up to its tip, or until it turns out to be slow."""
        first = self._place.head.round + 1
        batch: tuple[bytes, ...] | None = await self._certificates(peer, first, tip, tips)
        while batch is not None:
            self._tell(self._place.head.round + 1, tips.highest())
            ahead = self._place.head.round + len(batch) + 1
            coming = asyncio.create_task(self._certificates(peer, ahead, tip, tips)) if ahead <= tip.round else None
            try:
                with _blaming(peer, tip):
                    await self._take(batch, tips)
                batch = await coming if coming is not None else None
            finally:
                if coming is not None:
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            if tips.best(self._place.head.round) not in (None, (peer, tip)):
                return  # somebody else is preferred by now

    async def _certificates(self, peer: PeerId, first: int, tip: Tip, tips: Tips) -> tuple[bytes, ...]:
        count = min(MAX_CERTIFICATES, tip.round - first + 1)
        began_ms = self._around.clock.now_ms()
        with _blaming(peer, tip):
            frames = await self._around.transport.ask(peer, encode(CertificatesQuestion(first, count)))
            if not frames and first < tip.first:
                raise TransportError(f"it has skipped the certificate of round {first:,} itself")
            if not frames:
                raise RemoteProtocolError(peer, f"it does not give the certificate of round {first:,}")
        if self._around.clock.now_ms() - began_ms > _SLOW_MS:
            tips.postpone(peer)
        return frames[:count]

    async def _take(self, batch: tuple[bytes, ...], tips: Tips) -> None:
        """Verify a batch, store what is good of it, and go on from there. Raises RemoteProtocolError."""
        chain: list[Link] = []
        problem = await asyncio.to_thread(_chain_up, self._place, batch, chain)
        await self._around.verification.check_soon([check for link in chain for check in link.checks])
        entries = [(entry_of(link.certificate, link.encoded), tables_of(link.after)) for link in chain]
        await asyncio.to_thread(self._around.ledger.extend, entries)
        for link in chain:
            self._place.step(link.certificate, link.after)
        self.num_followed += len(chain)
        finals = [link.after for link in chain if link.after.is_final]
        for liar in tips.contradicted({(head.epoch, head.round): head.hash for head in finals}):
            self._name(liar, "it claims another certificate than the one that a quorum signed")
            tips.drop(liar, "a lie")
        if problem is not None:
            raise problem

    # --- skipping ----------------------------------------------------------------------------------------------------

    async def _skip(self, peer: PeerId, tip: Tip, tips: Tips) -> bool:
        """Go to a peer's tip by the skip rule; what it lacks on the way comes from others. False: a round on the way
        has no final certificate, and the peer has the whole chain."""
        head = self._place.head
        skipping = Skipping(anchor_of(head), tip.round)
        while (wanted := skipping.wanted) is not None:
            self._tell(wanted, tip.round)
            source = peer if wanted >= tip.first else tips.with_round(wanted)
            if source is None:
                raise TransportError(f"nobody has what is needed to skip to round {wanted:,}")
            with _blaming(source, tip):
                answer = await self._ask_one(source, WaypointQuestion(wanted))
                if answer is None and wanted != tip.round and tip.first <= head.round + 1:
                    return False
                if not isinstance(answer, Waypoint):
                    raise RemoteProtocolError(source, f"it does not give the waypoint of round {wanted:,}")
                await self._around.verification.check_soon(skipping.take(answer).checks)
        with _blaming(peer, tip):
            if skipping.anchor.hash != tip.hash:
                raise RemoteProtocolError(peer, "it has another certificate than it claims")
            answer = await self._ask_one(peer, TablesQuestion(tip.round))
            if not isinstance(answer, Tables):
                raise RemoteProtocolError(peer, f"it does not give the tables of round {tip.round:,}")
            after = head_at(head.run, skipping.path[-1], answer.state)
        last = skipping.path[-1]
        gap = Gap(
            epoch=head.epoch,
            from_round=RoundNumber(head.round),
            to_round=RoundNumber(after.round),
            waypoints=tuple(map(encode, skipping.path)),
        )
        entry, tables = entry_of(last.certificate), tables_of(after, always=True)
        await asyncio.to_thread(self._around.ledger.skip, gap, entry, tables)
        self._place.jump(last.certificate, after)
        self._around.notify(
            "info",
            f"rounds {head.round + 1:,} to {after.round:,} were skipped, by way of {len(skipping.path)} certificates",
        )
        return True

    # --- for all -----------------------------------------------------------------------------------------------------

    async def _ask_one(self, peer: PeerId, question: Question) -> Answer | None:
        """A peer's answer; None if it does not have what is asked for. Raises TransportError, RemoteProtocolError."""
        frames = await self._around.transport.ask(peer, encode(question))
        return decode_answer(frames[0], peer) if frames else None

    def _tell(self, number: int, total: int) -> None:
        text = f"checking round {number:,} of {total:,}"
        self._around.waiting(text)
        now_ms = self._around.clock.now_ms()
        if self._told_at_ms is None or now_ms - self._told_at_ms >= _TELL_EVERY_MS:
            self._told_at_ms = now_ms
            self._around.notify("info", text)

    def _name(self, peer: PeerId, reason: str) -> None:
        self._around.notify("warning", f"peer {peer_text(peer)} is not believed: {reason}")


def _chain_up(place: Resumption, batch: tuple[bytes, ...], chain: list[Link]) -> RemoteProtocolError | None:
    """Fill `chain` with the links of a batch; the problem of the first that is none."""
    try:
        for link in links(place.head, batch):
            chain.append(link)
    except RemoteProtocolError as error:
        return error
    return None
