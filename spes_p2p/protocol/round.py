"""`RoundMachine`: one peer's part in a run, round after round.

The machine is given messages, results of local work and the time (`handle`), and returns effects; `deadline_ms` says
when it wants to be called again at the latest. It never waits, reads no clock and owns no thread. All sets and roles of
a round follow from the previous certificate (`head.Terms`). A round is open from one adoption to the next:

    phase        begins with                                   ends with
    load         adoption                                      StateReady: the state is on disk
    train        StateReady (members, from round 2 on)         Trained: H steps, round_max, or the grace after others
    publish      Trained: manifest to all members              the update's receipt
    acknowledge  view 0: all live are in, or the grace         a cut
    aggregate    a cut of the view's leader                    a proposal
    vote         a proposal                                    q precommits
    adopt        a certificate                                 StateReady

A machine that is no member follows certificates, loads the state, and asks to join. One that missed rounds asks for
certificates one after the other and loads the newest state only. A round may be open in several *ballots* one after the
other: the final one, and tentative attempts of a side of the voters while the others are silent (`siding`). What lasts
over all rounds after one final certificate is the `Height`; `branches` decides which tentative one to build on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.announce import audience_of
from spes_p2p.protocol.body import Certificate, base_of
from spes_p2p.protocol.branches import abandoned
from spes_p2p.protocol.certificate import certificate_terms, votes_of_certificate
from spes_p2p.protocol.codec import body_hash, encode
from spes_p2p.protocol.context import Context, still_acked
from spes_p2p.protocol.derive import Derive
from spes_p2p.protocol.effects import Effect, Input
from spes_p2p.protocol.greeting import begin, greet, say_leave
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.height import Height
from spes_p2p.protocol.history import Held, History
from spes_p2p.protocol.inbox import Inbox, Parked
from spes_p2p.protocol.leaving import Leaving
from spes_p2p.protocol.messages import Decided, HandoverDone, Message, Side, Signed, TipAsk
from spes_p2p.protocol.open_round import OpenRound
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.params import LATE_ROUNDS, STATEMENT_ROUNDS
from spes_p2p.protocol.progress import Progress, progress_of
from spes_p2p.protocol.recovery import follow, has_split
from spes_p2p.protocol.reopening import inherit, resume, stash_of
from spes_p2p.protocol.rescue import Rescue
from spes_p2p.protocol.routing import Place, branch_of, place_of
from spes_p2p.protocol.siding import Siding
from spes_p2p.protocol.stash import Stash
from spes_p2p.protocol.tidings import Tidings
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.protocol.wishes import Wishes as Wishes


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
        derive: Derive | None = None,
    ) -> None:
        self._derive = derive or Derive()
        self._signer = signer
        self._verifier = verifier
        self._wishes = wishes
        self._outbox = Outbox(head.run.config.protocol.resend_ms)
        self._history = History()
        self._inbox = Inbox()
        self._tidings = Tidings(self._outbox, self._inbox, head, now_ms)
        self._leaving: Leaving | None = None
        self._due_ms: int | None = now_ms
        self._num_cuts = 0
        self._journal = dict(journal or {})
        self._effects: list[Effect] = []
        self._now_ms = now_ms
        self._height = Height.of(head)
        self._parked = Parked()
        self._siding = Siding(signer.peer_id, head, now_ms)
        self._rescue = Rescue(wishes.recovery)
        self._open(Terms(head), [])

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
        finished = self._wishes.finished(self.head)
        return progress_of(self._round, self._leaving, finished, now_ms, self._siding, self._rescue)

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
        context.now_ms = self._now_ms = now_ms
        match event:
            case fx.Received():
                self._receive(event.sender, event.data)
            case fx.Delivered():
                self._outbox.delivered(event.ticket)
                if self._due_ms is None or now_ms < self._due_ms:
                    return self._flush()  # it makes nothing possible: half of all inputs are cheap
            case fx.StateReady():
                if event.round == self.terms.round and event.head in (None, self.head.hash):
                    begin(self._round, self._wishes, stays=not self._wishes.finished(self.head) and not self.leaving)
            case fx.PeersKnown():
                self._tidings.known_peers = tuple(sorted(set(event.peers) - {context.me}))
            case fx.LeaveWanted():
                if self._leaving is None or self._leaving.pending:
                    self._leaving = Leaving(event.handover or NO_DIGEST, event.handover_bytes)
                    say_leave(self._round, self._leaving)
            case fx.HandoverTaken():
                context.send([event.leaver], HandoverDone(event.round, event.handover))
            case fx.HoldWanted():
                self._wishes = self._wishes.holding(event.held)
            case fx.RecoverWanted():
                self._finish_own(self._rescue.wanted(context, event.keep, self._siding.heard(self.terms)))
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
            self._tidings.deadline_ms(),
            self._siding.deadline_ms(),
            self._rescue.due_ms(self._round.context),
        ]
        return min((at for at in candidates if at is not None), default=None)

    def _flush(self) -> list[Effect]:
        """Effects in order, everything durable first."""
        found = self._effects + self._round.context.effects
        self._effects = []
        self._round.context.effects = []
        return sorted(found, key=lambda effect: not isinstance(effect, fx.Persist))

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _open(
        self, terms: Terms, carried: list[Held], *, stash: Stash | None = None, before: OpenRound | None = None
    ) -> None:
        """Open the round after a head, or another ballot of the round `before`."""
        head = terms.head
        if before is None:
            self._tidings.opened()
        self._history.enter_rows(head.state.shards, head.round)
        context = Context(
            terms=terms,
            signer=self._signer,
            verifier=self._verifier,
            outbox=self._outbox,
            private_seed=self._wishes.private_seed,
            now_ms=self._now_ms,
            opened_at_ms=self._now_ms,
            derive=self._derive,
        )
        context.restore(self._journal)
        self._round = OpenRound(context, self._history)
        if before is not None:
            resume(self._round, before)
        self._round.restore()
        for held in carried:
            with suppress(RemoteProtocolError):  # valid in its round, not in this one: it has expired
                self._round.carry(held)
        if stash is not None:
            inherit(self._round, stash)
        kept = [] if terms.tentative else list(self._height.log)
        kept += self._parked.take(terms.branch)
        if before is None:
            kept += self._inbox.take(terms.round)
        for sender, data in kept:
            try:
                self._take(sender, data)
            except RemoteProtocolError as error:
                self._round.context.notify(f"dropped a message kept for this round: {error.reason}", "warning")

    def _close(self) -> Stash:
        """Remember what the open round leaves to the height, and to its next ballot."""
        context, voting = self._round.context, self._round.voting
        if not context.terms.tentative:
            self._height.log = list(voting.log)
            self._height.pinned = voting.pinned_base() or self._height.pinned
        stash = stash_of(self._round)
        if self._height.pinned == stash.tip:
            self._height.stash = stash
        self._journal = dict(context.journal)
        self._effects += context.effects
        context.effects = []
        self._num_cuts += self._round.leader.num_cuts
        return stash

    def _adopt(self, certificate: Certificate, head: Head, terms: Terms) -> None:
        """Close the open round with a verified certificate, of its own tip or of another, and open the next."""
        context = self._round.context
        lost = abandoned(self.head, terms.head)
        self._tidings.adopted(self.head, lost, head, encode(certificate))
        if context.me in terms.all_voters:
            receivers = audience_of(terms, certificate, context.me, self._round.joiners())
            context.send(receivers, Decided(head.epoch, head.round, head.hash))
        for held in self._round.accepted(certificate.body):
            self._history.remember(held)
        handovers = self._round.handovers(certificate.body.cut)
        carried = self._round.left_over(certificate.body) + (self._height.spent if lost else [])
        spent = self._round.updates_in(certificate.body)
        self._close()
        self._effects.append(
            fx.Adopt(
                certificate=certificate,
                head=head,
                holders=tuple(peer for peer in terms.members if peer != context.me),
                handovers=handovers,
                before=terms.head,
                anchors=() if head.is_final else self._height.anchors(),
                abandoned=lost,
            )
        )
        self._outbox.expire(head.round - LATE_ROUNDS)
        if self._leaving is not None:
            self._leaving.certified(self.head, head, context.me, context.now_ms)
        side = self._siding.next_side(terms, context.terms.side, head)
        if head.is_final:
            self._journal = still_acked(self._journal, terms, Terms(head))
            if self._journal:
                self._effects.append(fx.Persist(entries=dict(self._journal)))
            self._height = Height.of(head)
            self._siding.new_height()
            self._rescue.troubled_at_ms = None
        else:
            self._height.enter(head, certificate, spent)
        self._parked.new_round(height=head.is_final)
        self._open(Terms(head, side), carried)
        self._greet()

    def _greet(self) -> None:
        greet(self._round, self._wishes, self._leaving, finished=self._wishes.finished(self.head))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, sender: PeerId, data: bytes) -> None:
        if sender in self._round.context.terms.member_set:
            self._siding.ears.hear(sender, self._now_ms)
        self._take(sender, data)

    def _take(self, sender: PeerId, data: bytes) -> None:
        """A message that has just come, or was kept."""
        message = self._derive.message(data, sender)
        if isinstance(message, HandoverDone):
            if self._leaving is not None:
                self._leaving.taken_over(sender, message.handover)
        elif isinstance(message, TipAsk):
            self._tidings.answer(self._round, self._height, sender, message)
        elif isinstance(message, Certificate):
            self._certificate(sender, message, data)
        elif isinstance(message, Decided) and message.epoch == self.head.epoch:
            self._tidings.told(self._round.context, self._height, sender, message)
        elif isinstance(message, Signed) and isinstance(message.body, Side):
            self._side(sender, message, message.body)
        else:
            self._of_a_round(sender, message, data)

    def _of_a_round(self, sender: PeerId, message: Message, data: bytes) -> None:
        place, number = place_of(message, self.terms)
        match place:
            case Place.NOWHERE:
                raise RemoteProtocolError(sender, "a message that belongs to no round")
            case Place.NOW:
                self._round.remote(sender, message)
            case Place.OTHER_BALLOT:
                branch = branch_of(message)
                if branch is not None and sender in self.terms.member_set:
                    self._parked.keep(branch, sender, data)
            case Place.LATER:
                self._keep(sender, number, data)
            case Place.LATE:
                self._answer_late(sender, message, number)
            case Place.UNKNOWN_CHAIN:
                self._ask_sometimes(sender)
            case _:  # of a past epoch
                self._tidings.announce(self._round.context, sender, min(number, self.head.round))

    def _keep(self, sender: PeerId, number: int, data: bytes) -> None:
        """A message of a later round: keep it, if it is of the next one, and ask its sender."""
        context = self._round.context
        keeps = number == context.terms.round + 1
        if not keeps or not self._inbox.keep(number, sender, data, member=sender in context.terms.member_set):
            self._tidings.behind = True
        self._tidings.ahead(context, self._height, sender)

    def _ask_sometimes(self, sender: PeerId) -> None:
        self._tidings.ask_sometimes(self._round.context, self._height, sender)

    def _answer_late(self, sender: PeerId, message: Message, number: int) -> None:
        """Statements and acks may be late; whoever sends anything of an older round is told of its certificate."""
        self._tidings.announce(self._round.context, sender, number)
        if number >= self._round.context.terms.round - max(LATE_ROUNDS, STATEMENT_ROUNDS):
            self._round.late(sender, message)

    # --- certificates ------------------------------------------------------------------------------------------------

    def _certificate(self, sender: PeerId, certificate: Certificate, data: bytes) -> None:
        """Follow a certificate of this height, and remember one of the next round."""
        body, context = certificate.body, self._round.context
        if body.run != self.head.run.run_id:
            raise RemoteProtocolError(sender, "a certificate of another run")
        base = self._height.branches.get(base_of(body))
        known = self._height.branches.get(body_hash(body))
        if known is not None:
            self._height.show(sender, known)
        is_old = (body.epoch, body.round) <= (self.head.epoch, self.head.last_final.round)
        if is_old or (known is not None and not self._height.branches.lacks(known)):
            return
        if base is None:
            self._without_base(sender, certificate, data)
            return
        catching_up = self._tidings.behind or not context.state_ready or not context.is_member
        self._finish(base, certificate, sender)
        if catching_up:
            self._tidings.behind = False
            self._tidings.ask(self._round.context, self._height, sender)

    def _without_base(self, sender: PeerId, certificate: Certificate, data: bytes) -> None:
        """A certificate on top of one that is not known here."""
        body = certificate.body
        if body.epoch > self.head.epoch and has_split(self.head, certificate, self._verifier):
            self._rescue.say_split(self._round.context)
        elif body.round > self.terms.round:
            self._keep(sender, body.round, data)
        else:
            self._height.ask_from(sender, self.head.last_final)
            self._ask_sometimes(sender)

    def _finish(self, base: Head, certificate: Certificate, sender: PeerId | None = None) -> None:
        """Verify a certificate on top of a known head, and go where it leads."""
        head, terms = follow(base, certificate, self._verifier, self._derive.head)
        if terms.branch == self.terms.branch and head.epoch == terms.head.epoch:
            self._round.voting.compare(votes_of_certificate(terms, certificate))
        if head.is_final:
            self._conclude(certificate, head, terms)
            return
        own = {known.hash for known in self.head.branch}
        if self._height.branches.add(head, certificate) and sender is not None and head.hash not in own:
            self._height.ask_from(sender, head)
        self._choose_tip()
        if sender is not None and head.hash not in {known.hash for known in self.head.branch}:
            self._ask_sometimes(sender)

    def _conclude(self, certificate: Certificate, head: Head, terms: Terms) -> None:
        """Adopt a final certificate: the tentative ones that it builds on belong to the chain too."""
        height = self._height
        self._go_to(terms.head)
        if self._height is height:  # a message that was kept may have done it already
            self._adopt(certificate, head, terms)

    def _finish_own(self, recovery: Certificate | None) -> None:
        if recovery is not None:
            self._finish(self.head, recovery)

    def _choose_tip(self) -> None:
        """Build on the tip that the highest quorum certificate is bound to, or else that of the fork choice."""
        may_finish = self._siding.whole and not self.terms.tentative
        pinned = (self._round.voting.pinned_base() or self._height.pinned) if may_finish else None
        tip = self._height.goal(pinned)
        if tip.hash == self.head.hash:
            return  # nearly always, after every input
        if self.head.has_passed(tip):
            self._go_back(tip)
        elif (lacking := self._height.lacking(self.head, tip)) is None:
            self._go_to(tip)
        else:
            self._tidings.seek(self._round.context, self._height, self._height.base_of(lacking))

    def _go_to(self, tip: Head) -> None:
        """Adopt the certificates that lead to a known tip, as far as they are here."""
        for head, certificate in self._height.path(self.head, tip):
            self._adopt(certificate, head, certificate_terms(self._height.base_of(head), certificate.body))
            if self.head.hash != head.hash:
                return

    def _go_back(self, tip: Head) -> None:
        """Build on an earlier certificate of this peer's own chain again."""
        lost = abandoned(self.head, tip)
        carried = [*self._round.updates.slots.values(), *self._height.spent]
        self._tidings.abandon(self.head, lost)
        self._close()
        holders = tuple(peer for peer in self.terms.members if peer != self._signer.peer_id)
        self._effects.append(fx.GoBack(head=tip, holders=holders, anchors=self._height.anchors(), abandoned=lost))
        self._parked.new_round(height=False)
        self._open(Terms(tip), carried, stash=self._height.stash_of(tip))
        self._greet()

    def _advance(self) -> None:
        """Go on as far as what is known allows."""
        self._round.advance()
        certificate = self._round.voting.decided()
        while certificate is not None:
            base = self._height.branches.get(base_of(certificate.body))
            if base is None or self._height.branches.get(body_hash(certificate.body)) is not None:
                break  # its tip is asked for; or it is known, and a better branch too
            self._finish(base, certificate)
            self._round.advance()
            certificate = self._round.voting.decided()
        self._watch()
        if self._leaving is not None and self._leaving.ends(self._now_ms, self.head.run.config.protocol.round_max_ms):
            self._round.context.emit(fx.Left())

    # --- sides -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Go on with a side of the voters, or with all again, as it changes who can be reached."""
        side = self._siding.watch(self._round)
        if side is not None:
            self._reopen(side)
        if self._siding.whole:
            self._choose_tip()
        self._rescue.watch(self.head, self._siding.halted, self._now_ms)
        self._siding.probe(self._round.context)

    def _reopen(self, side: tuple[PeerId, ...]) -> None:
        """Another ballot of the open round, with all that is known of it."""
        before = self._round
        stash = self._close()
        self._open(Terms(self.head, side), [], stash=stash, before=before)
        self._siding.announce(self._round.context, before.context.terms.eligible)
        if not side and self._siding.whole:
            self._tidings.ask_voters(self._round.context, self._height)

    def _side(self, sender: PeerId, signed: Signed, side: Side) -> None:
        """A voter says whom it hears. Raises RemoteProtocolError."""
        if side.run != self.head.run.run_id or signed.peer != sender:
            raise RemoteProtocolError(sender, "a side of another run or peer")
        followed = self._siding.take(self._round.context, signed, side)
        if followed is not None:
            self._reopen(followed)
        if side.tip != self.head.hash and sender in self.terms.members:
            self._ask_sometimes(sender)

    def _tick(self) -> None:
        context = self._round.context
        for send in self._outbox.due(context.now_ms):
            context.emit(send)
        context.tick()
        self._round.tick()
        self._finish_own(self._rescue.due(context, self._siding.heard(context.terms)))
        self._tidings.ask_around(self._round, self._height)
