"""`RoundMachine`: one peer's part in a run, round after round.

Theory of operation. The machine is given messages, results of local work and the time (`handle`), and returns effects;
`deadline_ms` says when it wants to be called again at the latest. It never waits, reads no clock and owns no thread.
All sets and roles of a round follow from the previous certificate (`head.Terms`). A round is open from the adoption of
one certificate to the next:

    phase        begins with                                   ends with
    load         adoption                                      StateReady: the state is on disk
    train        StateReady (members, from round 2 on)         Trained: H steps, round_max, or the grace after others
    publish      Trained: manifest to all members              the update's receipt
    acknowledge  view 0: all live are in, or the grace         a cut
    aggregate    a cut of the view's leader                    a proposal
    vote         a proposal                                    q precommits
    adopt        a certificate                                 StateReady

A machine that is no member follows certificates, loads the state, and asks to join. One that missed rounds asks for
certificates one after the other and loads the newest state only. Parts of the round live in files of their own:
`updates` (statements, acks, receipts), `cuts`, `parts` (averaging), `bodies` (objective checks), `voting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.announce import CertificatePull
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.certificate import verify_certificate, votes_of_certificate
from spes_p2p.protocol.codec import decode, encode
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.effects import Effect, Input
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.history import Held, History
from spes_p2p.protocol.inbox import Inbox, round_of
from spes_p2p.protocol.messages import Alive, Claim, Decided, HandoverDone, Join, Leave, Message, TipAsk
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.params import LATE_ROUNDS, STATEMENT_ROUNDS
from spes_p2p.protocol.progress import Progress, progress_of
from spes_p2p.protocol.roster import admitted
from spes_p2p.protocol.wire import NO_DIGEST

_KEEP_CERTIFICATES = 64
"""Certificates kept in memory to answer those who are behind; older ones are served from the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What this peer wants of the run."""

    capacity: int
    """Most shards to own."""
    private_seed: bytes
    """Known to nobody else: draws the part that this voter recomputes."""
    invite_signature: bytes = b""
    sponsor: bytes = b""
    sponsor_signature: bytes = b""
    stop_after_round: int | None = None
    """Train no more once this round is certified; serve on."""


@dataclass(slots=True)
class _Leaving:
    """A proper leave that was asked for."""

    handover: Digest
    handover_bytes: int
    certified_at_ms: int | None = None
    shards: tuple[int, ...] = ()
    successors: set[PeerId] = field(default_factory=set)
    done: bool = False
    reported: bool = False


class RoundMachine:
    """One peer in one run. `journal`: entries that were persisted before a restart."""

    def __init__(
        self,
        head: Head,
        signer: Signer,
        verifier: Verifier,
        wishes: Wishes,
        *,
        now_ms: int,
        journal: Mapping[str, bytes] | None = None,
    ) -> None:
        self._signer = signer
        self._verifier = verifier
        self._wishes = wishes
        self._outbox = Outbox(head.run.config.protocol.resend_ms)
        self._history = History()
        self._inbox = Inbox()
        self._certificates: dict[int, bytes] = {}
        self._known_peers: tuple[PeerId, ...] = ()
        self._leaving: _Leaving | None = None
        self._ask_tip_at_ms = now_ms
        self._tip_turn = 0
        self._behind = False
        """Messages of later rounds could not be kept: there is more to ask for."""
        self._due_ms: int | None = now_ms
        self._num_cuts = 0
        self._journal = dict(journal or {})
        self._effects: list[Effect] = []
        self._open(head, now_ms, [])

    # --- what the shell may look at ----------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The newest adopted certificate."""
        return self._round.context.terms.head

    @property
    def terms(self) -> Terms:
        """Roles of the open round."""
        return self._round.context.terms

    @property
    def is_member(self) -> bool:
        """Whether this peer is in the roster."""
        return self._round.context.is_member

    @property
    def leaving(self) -> bool:
        """Whether a proper leave was asked for."""
        return self._leaving is not None

    @property
    def num_cuts(self) -> int:
        """How many cuts this peer has named as leader since it started."""
        return self._num_cuts + self._round.leader.num_cuts

    def progress(self, now_ms: int) -> Progress:
        """How far the open round is, for people."""
        return progress_of(self._round, self._leaving is not None, self._finished, now_ms)

    # --- the one entrance --------------------------------------------------------------------------------------------

    def start(self, now_ms: int) -> list[Effect]:
        """Effects of having been made: greetings, and what the journal promised."""
        self._round.context.now_ms = now_ms
        self._greet()
        self._due_ms = self._next_deadline_ms()
        return self._flush()

    def handle(self, event: Input, now_ms: int) -> list[Effect]:
        """Take one input. Raises RemoteProtocolError if a peer broke the rules; what it sent is ignored."""
        context = self._round.context
        if now_ms < context.now_ms:
            raise LocalProtocolError("time went back")
        context.now_ms = now_ms
        match event:
            case fx.Received():
                self._receive(event.sender, event.data)
            case fx.Delivered():
                self._outbox.delivered(event.ticket)
                if self._due_ms is None or now_ms < self._due_ms:
                    return self._flush()  # it makes nothing possible: half of all inputs are cheap
            case fx.StateReady():
                self._state_ready(event.round)
            case fx.PeersKnown():
                self._known_peers = tuple(sorted(set(event.peers) - {context.me}))
            case fx.LeaveWanted():
                self._leave_wanted(event)
            case fx.HandoverTaken():
                context.send([event.leaver], HandoverDone(event.round, event.handover))
            case fx.Tick():
                pass
            case _:
                self._round.local(event)
        if isinstance(event, fx.Tick) or (self._due_ms is not None and now_ms >= self._due_ms):
            self._tick()  # whatever comes in: a busy shell may never find the time for a `Tick`
        self._advance()
        self._due_ms = self._next_deadline_ms()
        return self._flush()

    def deadline_ms(self) -> int | None:
        """When to call `handle(Tick())` at the latest."""
        return self._due_ms

    def _next_deadline_ms(self) -> int | None:
        candidates = [
            self._outbox.deadline_ms(),
            self._round.deadline_ms(),
            self._pull.deadline_ms(),
            self._ask_tip_at_ms,
        ]
        return min((at for at in candidates if at is not None), default=None)

    def _flush(self) -> list[Effect]:
        """Effects in order, everything durable first."""
        found = self._effects + self._round.context.effects
        self._effects = []
        self._round.context.effects = []
        return [e for e in found if isinstance(e, fx.Persist)] + [e for e in found if not isinstance(e, fx.Persist)]

    # --- rounds ------------------------------------------------------------------------------------------------------

    @property
    def _finished(self) -> bool:
        stop = self._wishes.stop_after_round
        return stop is not None and self.head.round >= stop

    def _open(self, head: Head, now_ms: int, carried: list[Held]) -> None:
        """Open the round after `head`."""
        terms = Terms(head)
        self._pull = CertificatePull(terms.config.protocol.resend_ms)
        self._history.enter_rows(head.state.shards, head.round)
        context = Context(
            terms=terms,
            signer=self._signer,
            verifier=self._verifier,
            outbox=self._outbox,
            private_seed=self._wishes.private_seed,
            now_ms=now_ms,
            opened_at_ms=now_ms,
        )
        context.restore(self._journal)
        self._round = OpenRound(context, self._history)
        self._round.restore(self._journal)
        for held in carried:
            self._carry(held)
        for sender, data in self._inbox.take(terms.round):
            try:
                self._receive(sender, data)
            except RemoteProtocolError as error:
                self._round.context.notify(f"dropped a message kept for this round: {error.reason}", "warning")

    def _carry(self, held: Held) -> None:
        """Keep a statement that was not in the cut while it is still valid."""
        try:
            self._round.carry(held)
        except RemoteProtocolError:
            return  # valid in its round, not in this one: it has expired

    def _adopt(self, certificate: Certificate, head: Head) -> None:
        """Close the open round with its certificate and open the next."""
        context = self._round.context
        terms = context.terms
        encoded = encode(certificate)
        self._certificates[head.round] = encoded
        self._certificates.pop(head.round - _KEEP_CERTIFICATES, None)
        receivers = list(terms.voters)
        order = terms.leaders
        place = certificate.view % len(order)
        announcing = [order[(place + step) % len(order)] for step in range(terms.num_faults + 1)]
        if context.me in announcing:
            receivers = sorted({*terms.voters, *terms.members, *self._round.joiners()})
        if context.is_voter:
            context.send(receivers, Decided(terms.head.epoch, terms.round, head.hash))
        for held in self._round.accepted(certificate.body):
            self._history.remember(held)
        self._effects += context.effects
        self._effects.append(
            fx.Adopt(
                certificate=certificate,
                head=head,
                holders=tuple(peer for peer in terms.members if peer != context.me),
                handovers=self._round.handovers(certificate.body.cut),
            )
        )
        context.effects = []
        self._num_cuts += self._round.leader.num_cuts
        carried = self._round.left_over(certificate.body)
        self._outbox.expire(head.round - LATE_ROUNDS)
        self._note_leave(certificate, head)
        self._journal = {}
        self._open(head, context.now_ms, carried)
        self._greet()

    def _greet(self) -> None:
        """What a peer says when a round opens: alive, a claim, a leave."""
        context = self._round.context
        head = context.terms.head
        if not context.is_member:
            return
        trains = context.terms.round > 1 and not self._finished and self._leaving is None
        trains = trains and context.promised("alive-no-more") is None  # said before a restart
        self._round.will_train = trains
        self._round.updates.accuse_again()
        self._say_claim()
        self._say_leave()
        if not self._finished:
            slot = "alive" if trains else "alive-no-more"
            alive = Alive(head.run.run_id, head.epoch, context.terms.round, trains)
            self._round.say(context.sign_once(slot, alive))

    def _say_claim(self) -> None:
        """Claim a shard while there is room here and one is vacant, or none is owned; state the capacity."""
        context = self._round.context
        head, state = context.terms.head, context.terms.head.state
        row = state.row(context.me)
        if row is None or self._leaving is not None or self._finished:
            return
        owned = len(state.shards_of(context.me))
        vacant = any(not lease.owners for lease in state.leases)
        wants = owned < self._wishes.capacity and (vacant or owned == 0)
        if wants or row.capacity != self._wishes.capacity:
            body = Claim(head.run.run_id, head.epoch, context.terms.round, self._wishes.capacity)
            self._round.say(context.sign_once("claim", body))

    def _say_join(self) -> None:
        """Ask to be a member: the state of a certificate at most one round old is on disk."""
        context = self._round.context
        head, wishes = context.terms.head, self._wishes
        body = Join(
            head.run.run_id,
            head.epoch,
            context.terms.round,
            wishes.capacity,
            wishes.invite_signature,
            wishes.sponsor,
            wishes.sponsor_signature,
        )
        if not admitted(head.run, context.me, body, self._verifier):
            text = f"this run ({head.run.config.protocol.admission}) does not admit this node: its link lets nobody in"
            context.notify(text, "error")
            return
        self._round.say(context.sign_once("join", body))

    def _state_ready(self, round_number: int) -> None:
        context = self._round.context
        if round_number != context.terms.round or context.state_ready:
            return
        context.state_ready = True
        if not context.is_member:
            if not self._finished and self._leaving is None:
                self._say_join()
            return
        resumed = self._round.resume_update()  # whether or not it trains again
        if self._round.will_train and not resumed:
            head = context.terms.head
            context.emit(fx.Train(round=context.terms.round, inner_steps=head.inner_steps))
            self._round.training = True

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave_wanted(self, event: fx.LeaveWanted) -> None:
        if self._leaving is None or self._leaving.certified_at_ms is None:
            self._leaving = _Leaving(event.handover or NO_DIGEST, event.handover_bytes)
            self._say_leave()

    def _say_leave(self) -> None:
        context = self._round.context
        if self._leaving is None or self._leaving.certified_at_ms is not None:
            return
        if not context.is_member:
            self._leaving.done = True
            return
        head = context.terms.head
        body = Leave(
            head.run.run_id, head.epoch, context.terms.round, self._leaving.handover, self._leaving.handover_bytes
        )
        signed = context.sign_once("leave", body)
        self._leaving.handover = cast(Leave, signed.body).handover  # what was promised first counts
        self._round.say(signed)

    def _note_leave(self, certificate: Certificate, head: Head) -> None:
        leaving, me = self._leaving, self._signer.peer_id
        if leaving is None or leaving.certified_at_ms is not None or head.state.row(me) is not None:
            return
        leaving.certified_at_ms = self._round.context.now_ms
        if leaving.handover != NO_DIGEST:
            leaving.shards = self.head.state.shards_of(me)
            leaving.successors = {owner for shard in leaving.shards for owner in head.state.owners(shard)}
        leaving.done = not leaving.successors

    def _handover_done(self, sender: PeerId, message: HandoverDone) -> None:
        if self._leaving is not None and message.handover == self._leaving.handover:
            self._leaving.successors.discard(sender)
            self._leaving.done = self._leaving.certified_at_ms is not None and not self._leaving.successors

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, sender: PeerId, data: bytes) -> None:
        message = decode(data, sender)
        context = self._round.context
        if isinstance(message, HandoverDone):
            self._handover_done(sender, message)
            return
        if isinstance(message, TipAsk):
            self._answer_tip(sender, message)
            return
        number = round_of(message)
        if number < 0:
            raise RemoteProtocolError(sender, "a message that belongs to no round")
        if number > context.terms.round:
            keeps = number == context.terms.round + 1
            if not keeps or not self._inbox.keep(number, sender, data, member=sender in context.terms.member_set):
                self._behind = True
            self._hear_of_certificate(sender)
            return
        if isinstance(message, Decided):
            if number == context.terms.round:
                self._hear_of_certificate(sender)
            return
        if isinstance(message, Certificate):
            if number == context.terms.round:
                catching_up = self._behind or not context.state_ready or not context.is_member
                self._finish(message)
                if catching_up:
                    self._behind = False
                    self._ask_tip(sender)
            return
        if number < context.terms.round:
            self._answer_late(sender, message, number)
            return
        self._round.remote(sender, message)

    def _hear_of_certificate(self, sender: PeerId) -> None:
        """A peer is past this round: it has the certificate, if it tells the truth."""
        context = self._round.context
        self._pull.told(
            sender,
            context.now_ms,
            is_member=sender in context.terms.member_set,
            may_decide=context.is_voter and not self._behind,
        )
        self._pull_certificate()

    def _pull_certificate(self) -> None:
        source = self._pull.next(self._round.context.now_ms)
        if source is not None:
            self._ask_tip(source)

    def _answer_late(self, sender: PeerId, message: Message, number: int) -> None:
        """Statements and acks may be late; whoever sends anything of an older round is told of its certificate."""
        context = self._round.context
        if self._inbox.may_announce(sender, number, context.now_ms, context.terms.config.protocol.resend_ms):
            identity = dict(context.terms.head.recent).get(number, NO_DIGEST)
            context.emit(self._outbox.once(sender, encode(Decided(context.terms.head.epoch, number, identity))))
        if number >= context.terms.round - max(LATE_ROUNDS, STATEMENT_ROUNDS):
            self._round.late(sender, message)

    def _finish(self, certificate: Certificate) -> None:
        head = verify_certificate(self.terms, certificate, self._verifier)
        self._round.voting.compare(votes_of_certificate(self.terms, certificate))
        self._adopt(certificate, head)

    def _advance(self) -> None:
        """Go on as far as what is known allows."""
        self._round.advance()
        certificate = self._round.voting.decided()
        while certificate is not None:
            self._finish(certificate)
            self._round.advance()
            certificate = self._round.voting.decided()
        leaving = self._leaving
        if leaving is not None and leaving.certified_at_ms is not None and not leaving.done:
            waited_ms = self._round.context.now_ms - leaving.certified_at_ms
            leaving.done = waited_ms >= self.head.run.config.protocol.round_max_ms
        if leaving is not None and leaving.done and not leaving.reported:
            leaving.reported = True
            self._round.context.emit(fx.Left())

    # --- tips --------------------------------------------------------------------------------------------------------

    def _ask_tip(self, peer: PeerId) -> None:
        context = self._round.context
        ask = TipAsk(context.terms.head.epoch, context.terms.round)
        context.emit(self._outbox.once(peer, encode(ask)))

    def _answer_tip(self, sender: PeerId, ask: TipAsk) -> None:
        context = self._round.context
        resend_ms = context.terms.config.protocol.resend_ms
        if ask.round <= context.terms.round and not self._inbox.may_answer(
            sender, ask.round, context.now_ms, resend_ms // 2
        ):
            return
        if ask.round < context.terms.round:
            self._send_certificate(sender, ask.round)
        elif ask.round == context.terms.round:
            for data in self._round.everything(sender):
                context.emit(self._outbox.once(sender, data))
        elif self._inbox.may_ask(sender, context.now_ms, resend_ms):
            self._ask_tip(sender)

    def _send_certificate(self, peer: PeerId, number: int) -> None:
        context = self._round.context
        encoded = self._certificates.get(number)
        if encoded is not None:
            context.emit(self._outbox.once(peer, encoded))
        else:
            context.emit(fx.Serve(to=peer, round=number))

    def _tick(self) -> None:
        context = self._round.context
        for send in self._outbox.due(context.now_ms):
            context.emit(send)
        context.tick()
        self._round.tick()
        self._pull_certificate()
        if context.now_ms >= self._ask_tip_at_ms:
            self._ask_tips()

    def _ask_tips(self) -> None:
        """Ask a few peers for their tips: often while not a member or not ready, else only in a round that drags on."""
        context = self._round.context
        protocol = context.terms.config.protocol
        settled = context.is_member and context.state_ready
        if settled and not self._round.drags_on():
            self._ask_tip_at_ms = context.now_ms + protocol.view_timeout(3)
            return
        self._ask_tip_at_ms = context.now_ms + (protocol.view_timeout(3) if settled else protocol.resend_ms)
        peers = sorted({*context.terms.members, *self._known_peers} - {context.me})
        for _ in range(min(1 if settled else 3, len(peers))):
            self._ask_tip(peers[self._tip_turn % len(peers)])
            self._tip_turn += 1
