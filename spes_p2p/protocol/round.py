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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spes_p2p.errors import LocalProtocolError, RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.body import Certificate, base_of
from spes_p2p.protocol.branches import abandoned
from spes_p2p.protocol.certificate import certificate_terms, verify_certificate
from spes_p2p.protocol.codec import bitmap, bits, body_hash, check_signature, decode, encode, sign
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.effects import Effect, Input
from spes_p2p.protocol.head import Head, Terms, may_go_on, side_of
from spes_p2p.protocol.height import Height
from spes_p2p.protocol.inbox import Inbox, Parked, ballot_of, epoch_of, round_of
from spes_p2p.protocol.leaving import Leaving
from spes_p2p.protocol.messages import Alive, Claim, HandoverDone, Join, Leave, Manifest, Message, Side, Signed, TipAsk
from spes_p2p.protocol.open_round import OpenRound, Stash, served
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.params import LATE_ROUNDS, RECOVERY_MS, STATEMENT_ROUNDS, quorum
from spes_p2p.protocol.progress import Progress, progress_of
from spes_p2p.protocol.recovery import has_split, recover, sign_recovery, verify_recovery
from spes_p2p.protocol.roster import admitted
from spes_p2p.protocol.sides import Ears, reach, side_with
from spes_p2p.protocol.tips import answer_tip
from spes_p2p.protocol.updates import Held, History
from spes_p2p.protocol.wire import NO_DIGEST

_KEEP_CERTIFICATES = 64
"""Certificates kept in memory to answer those who are behind; older ones are served from the ledger."""
_CERTIFICATES_PER_ANSWER = 8
"""Sent for one `TipAsk`: the tentative ones before a final one belong together."""
_SIDES = -1
"""Stands for a round where answers to sides are counted."""
SPLIT = "the run has split: a recovery has begun a new epoch that is not on top of what this node has seen final"


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
    recovery: Signer | None = None
    """The run's recovery key, if this peer holds it."""


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
        self._leaving: Leaving | None = None
        self._ask_tip_at_ms = now_ms
        self._tip_turn = 0
        self._behind = False
        """Messages of later rounds could not be kept: there is more to ask for."""
        self._due_ms: int | None = now_ms
        self._num_cuts = 0
        self._journal = dict(journal or {})
        self._effects: list[Effect] = []
        self._now_ms = now_ms
        self._height = Height.of(head)
        self._parked = Parked()
        protocol = head.run.config.protocol
        self._ears = Ears(signer.peer_id, protocol.patience_ms, protocol.resend_ms, now_ms)
        self._next_probe_at_ms = now_ms
        self._troubled_at_ms: int | None = None
        """Since when no final certificate has been in sight."""
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
        return progress_of(
            self._round, self._leaving is not None, self._finished, now_ms, self._height.halted
        )

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
            case fx.StateReady():
                self._state_ready(event)
            case fx.PeersKnown():
                self._known_peers = tuple(sorted(set(event.peers) - {context.me}))
            case fx.LeaveWanted():
                self._leave_wanted(event)
            case fx.HandoverTaken():
                context.send([event.leaver], HandoverDone(event.round, event.handover))
            case fx.RecoverWanted():
                self._recover(event.keep)
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
        candidates = [self._outbox.deadline_ms(), self._round.deadline_ms(), self._ask_tip_at_ms]
        candidates += [self._next_probe_at_ms if self._probes else None, self._recovery_due_ms()]
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

    def _open(
        self, terms: Terms, carried: list[Held], *, stash: Stash | None = None, before: OpenRound | None = None
    ) -> None:
        """Open the round after a head, or another ballot of the round `before`."""
        head = terms.head
        self._history.enter_rows(head.state.shards, head.round)
        context = Context(
            terms=terms,
            signer=self._signer,
            verifier=self._verifier,
            outbox=self._outbox,
            private_seed=self._wishes.private_seed,
            now_ms=self._now_ms,
            opened_at_ms=self._now_ms,
        )
        context.restore(self._journal)
        self._round = OpenRound(context, self._history)
        if before is not None:
            self._round.resume(before)
        self._round.restore()
        for held in carried:
            self._carry(held)
        if stash is not None:
            self._round.inherit(stash)
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
        """Remember what the open round leaves to the height, and to another ballot of the same round."""
        context, voting = self._round.context, self._round.voting
        if not context.terms.tentative:
            self._height.log = list(voting.log)
            self._height.pinned = voting.pinned_base() or self._height.pinned
        stash = self._round.stash()
        if self._height.pinned == stash.tip:
            self._height.stash = stash
        self._journal = dict(context.journal)
        self._effects += context.effects
        context.effects = []
        self._num_cuts += self._round.leader.num_cuts
        return stash

    def _carry(self, held: Held) -> None:
        """Keep a statement that was not in the cut while it is still valid."""
        try:
            self._round.carry(held)
        except RemoteProtocolError:
            return  # valid in its round, not in this one: it has expired

    def _adopt(self, certificate: Certificate, head: Head, terms: Terms) -> None:
        """Close the open round with a verified certificate, of its own tip or of another, and open the next."""
        context = self._round.context
        encoded = encode(certificate)
        lost = abandoned(self.head, terms.head)
        if lost:
            self._abandon(terms.head.round)
        self._certificates[head.round] = encoded
        self._certificates.pop(head.round - _KEEP_CERTIFICATES, None)
        receivers = list(terms.voters)
        order = terms.leaders
        place = certificate.view % len(order)
        announcing = [order[(place + step) % len(order)] for step in range(terms.num_faults + 1)]
        if context.me in announcing or head.epoch > terms.head.epoch:
            receivers = sorted({*terms.members, *terms.voters, *self._round.joiners()})
        if context.me in terms.all_voters:
            context.send(receivers, certificate)
        for held in self._round.accepted(certificate.body):
            self._history.remember(held)
        self._history.note_served(served(certificate.body), head.round)
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
                abandoned=lost,
            )
        )
        self._outbox.expire(head.round - LATE_ROUNDS)
        if self._leaving is not None:
            self._leaving.certified(self.head, head, context.me, context.now_ms)
        side = self._next_side(terms, head)
        if head.is_final:
            self._journal = {}
            self._height = Height.of(head)
            self._ears.new_height()
            self._troubled_at_ms = None
        else:
            self._height.enter(head, certificate, spent)
        self._parked.new_round(height=head.is_final)
        self._open(Terms(head, side), carried)
        self._greet()

    def _next_side(self, terms: Terms, head: Head) -> tuple[PeerId, ...]:
        """Who goes on after a tentative certificate: nobody waits again for those that are silent still."""
        mine = self._round.context.terms.side
        goes_on = not head.is_final and not self._height.whole and may_go_on(head, mine)
        return mine if goes_on and mine == terms.side else ()

    def _abandon(self, after_round: int) -> None:
        """Forget what later certificates of a branch that is left have done."""
        for number in [number for number in self._certificates if number > after_round]:
            del self._certificates[number]
        self._history.forget_served(after_round)

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

    def _state_ready(self, event: fx.StateReady) -> None:
        context = self._round.context
        if event.round != context.terms.round or context.state_ready:
            return
        if event.head not in (None, self.head.hash):
            return  # the state of a branch that was left
        context.state_ready = True
        if not context.is_member:
            if not self._finished and self._leaving is None:
                self._say_join()
            return
        if self._round.will_train and not self._round.resume_update():
            head = context.terms.head
            context.emit(fx.Train(round=context.terms.round, inner_steps=head.inner_steps, base=head.hash))
            self._round.training = True

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave_wanted(self, event: fx.LeaveWanted) -> None:
        if self._leaving is None or self._leaving.pending:
            self._leaving = Leaving(event.handover or NO_DIGEST, event.handover_bytes)
            self._say_leave()

    def _say_leave(self) -> None:
        context = self._round.context
        if self._leaving is None or not self._leaving.pending:
            return
        if not context.is_member:
            self._leaving.done = True
            return
        head = context.terms.head
        body = Leave(
            head.run.run_id, head.epoch, context.terms.round, self._leaving.handover, self._leaving.handover_bytes
        )
        signed = context.sign_once("leave", body)
        if isinstance(signed.body, Leave):
            self._leaving.handover = signed.body.handover  # what was promised first counts
        self._round.say(signed)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, sender: PeerId, data: bytes) -> None:
        if sender in self._round.context.terms.members:
            self._ears.hear(sender, self._now_ms)
        self._take(sender, data)

    def _take(self, sender: PeerId, data: bytes) -> None:
        """A message that has just come, or was kept."""
        message = decode(data, sender)
        if isinstance(message, HandoverDone):
            if self._leaving is not None:
                self._leaving.taken_over(sender, message.handover)
        elif isinstance(message, TipAsk):
            self._answer_tip(sender, message)
        elif isinstance(message, Certificate):
            self._certificate(sender, message, data)
        elif isinstance(message, Signed) and isinstance(message.body, Side):
            self._side(sender, message, message.body)
        elif epoch_of(message) not in (None, self.head.epoch):
            self._other_epoch(sender, message)
        elif not self._other_ballot(sender, message, data):
            self._of_a_round(sender, message, data)

    def _of_a_round(self, sender: PeerId, message: Message, data: bytes) -> None:
        context = self._round.context
        ballot = ballot_of(message)
        number = round_of(message) if ballot is None else ballot[0]
        if number < 0:
            raise RemoteProtocolError(sender, "a message that belongs to no round")
        if number > context.terms.round:
            self._keep(sender, number, data)
        elif number < context.terms.round and ballot != (context.terms.ballot_round, context.terms.branch):
            self._answer_late(sender, message, number)
        elif not self._on_another_branch(message):
            self._round.remote(sender, message)
        else:
            self._ask_sometimes(sender)

    def _keep(self, sender: PeerId, number: int, data: bytes) -> None:
        """A message of a later round: keep it, if it is of the next one, and ask its sender."""
        context = self._round.context
        keeps = number == context.terms.round + 1
        if not keeps or not self._inbox.keep(number, sender, data, member=sender in context.terms.members):
            self._behind = True
        self._ask_sometimes(sender)

    def _ask_sometimes(self, sender: PeerId) -> None:
        if self._inbox.may_ask(sender, self._now_ms, self.head.run.config.protocol.resend_ms):
            self._ask_tip(sender)

    def _on_another_branch(self, message: Message) -> bool:
        """Whether a message is an update on top of a certificate that is not on this peer's chain."""
        if not isinstance(message, Signed) or not isinstance(message.body, Manifest):
            return False
        if message.body.run != self.head.run.run_id:
            return False
        known = dict(self.head.recent).get(message.body.round - 1)
        return known is not None and known != message.body.prev

    def _other_ballot(self, sender: PeerId, message: Message, data: bytes) -> bool:
        """Keep a message of another ballot of this round or height until this peer takes part in it."""
        terms, ballot = self._round.context.terms, ballot_of(message)
        if ballot is None or ballot == (terms.ballot_round, terms.branch):
            return False
        number, branch = ballot
        if number == (terms.round if branch else terms.height):
            if sender in terms.members:
                self._parked.keep(branch, sender, data)
            return True
        if not branch and terms.height < number <= terms.round:
            self._ask_sometimes(sender)  # it has a final certificate that this peer lacks
            return True
        return False

    def _other_epoch(self, sender: PeerId, message: Message) -> None:
        epoch, number = epoch_of(message), round_of(message)
        if epoch is not None and epoch > self.head.epoch:
            self._ask_sometimes(sender)
        elif number <= self.head.round and self._may_answer(sender, number):
            self._send_certificate(sender, number)

    def _may_answer(self, peer: PeerId, number: int) -> bool:
        return self._inbox.may_answer(peer, number, self._now_ms, self.head.run.config.protocol.resend_ms)

    def _answer_late(self, sender: PeerId, message: Message, number: int) -> None:
        """Statements and acks may be late; whoever sends anything of an older round gets its certificate."""
        if self._may_answer(sender, number):
            self._send_certificate(sender, number)
        if number >= self._round.context.terms.round - max(LATE_ROUNDS, STATEMENT_ROUNDS):
            if self._on_another_branch(message):
                self._ask_sometimes(sender)
            else:
                self._round.late(sender, message)

    # --- certificates ------------------------------------------------------------------------------------------------

    def _certificate(self, sender: PeerId, certificate: Certificate, data: bytes) -> None:
        """Follow a certificate of this height, and remember one of the next round."""
        body, context = certificate.body, self._round.context
        if body.run != self.head.run.run_id:
            raise RemoteProtocolError(sender, "a certificate of another run")
        base = self._height.branches.get(base_of(body))
        if body.epoch < self.head.epoch or self._height.branches.get(body_hash(body)) is not None:
            return
        if base is None:
            self._without_base(sender, certificate, data)
            return
        catching_up = self._behind or not context.state_ready or not context.is_member
        self._finish(base, certificate, sender)
        if catching_up:
            self._behind = False
            self._ask_tip(sender)

    def _without_base(self, sender: PeerId, certificate: Certificate, data: bytes) -> None:
        """A certificate on top of one that is not known here."""
        body = certificate.body
        if body.epoch > self.head.epoch and has_split(self.head, certificate, self._verifier):
            self._tell_once("split", SPLIT, "error")
        elif body.round > self.terms.round:
            self._keep(sender, body.round, data)
        elif body.round > self.head.last_final.round:
            self._ask_sometimes(sender)

    def _finish(self, base: Head, certificate: Certificate, sender: PeerId | None = None) -> None:
        """Verify a certificate on top of a known head, and go where it leads."""
        body = certificate.body
        if body.epoch > base.epoch:
            self._adopt(certificate, verify_recovery(base, certificate, self._verifier), Terms(base))
            return
        terms = certificate_terms(base, body)
        head = verify_certificate(terms, certificate, self._verifier)
        if head.is_final:
            self._adopt(certificate, head, terms)
            return
        if self._height.branches.add(head, certificate) and sender is not None:
            self._height.shown[sender] = head
        self._choose_tip()
        if sender is not None and head.hash not in {known.hash for known in self.head.branch}:
            self._ask_sometimes(sender)

    def _choose_tip(self) -> None:
        """Build on the tip that the highest quorum certificate is bound to, or else that of the fork choice."""
        height, final_ballot = self._height, not self._round.context.terms.tentative
        pinned = self._round.voting.pinned_base() if final_ballot else None
        pinned = pinned or height.pinned
        tip = height.branches.get(pinned) if pinned is not None and final_ballot and height.whole else None
        tip = tip or height.branches.best()
        own = {known.hash for known in (self.head.last_final, *self.head.branch)}
        if tip.hash == self.head.hash:
            return
        if tip.hash in own:
            self._go_back(tip)
            return
        for head in tip.branch:
            certificate = height.branches.certificates.get(head.hash)
            if head.hash in own:
                continue
            if certificate is None or head.base is None:
                return  # adopted before a restart, and left: whoever has it shows it again
            self._adopt(certificate, head, certificate_terms(head.base, certificate.body))
            if self.head.hash != head.hash:
                return

    def _go_back(self, tip: Head) -> None:
        """Build on an earlier certificate of this peer's own chain again."""
        context = self._round.context
        lost = abandoned(self.head, tip)
        carried = [*self._round.updates.slots.values(), *self._height.spent]
        self._abandon(tip.round)
        self._close()
        holders = tuple(peer for peer in context.terms.members if peer != context.me)
        self._effects.append(fx.GoBack(head=tip, holders=holders, abandoned=lost))
        self._parked.new_round(height=False)
        stash = self._height.stash
        self._open(Terms(tip), carried, stash=stash if stash is not None and stash.tip == tip.hash else None)
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
        leaving = self._leaving
        if leaving is not None:
            leaving.wait(self._now_ms, self.head.run.config.protocol.round_max_ms)
            if leaving.done and not leaving.reported:
                leaving.reported = True
                self._round.context.emit(fx.Left())

    # --- sides -------------------------------------------------------------------------------------------------------

    @property
    def _probes(self) -> bool:
        """Whether voters are asked for a sign of life from time to time."""
        terms = self._round.context.terms
        return self._signer.peer_id in terms.all_voters and (self._ears.listening or terms.tentative)

    def _watch(self) -> None:
        """Find out whether a quorum can be reached; go on with a side of it, or with all, as that changes."""
        terms, height, me = self._round.context.terms, self._height, self._signer.peer_id
        if me not in terms.all_voters:
            return
        waiting = self._round.voting.view >= 0
        self._ears.listen(terms.all_voters, self._now_ms, waiting=waiting)
        hearing = self._ears.hearing(terms.all_voters)
        height.whole = len(reach(hearing, me)) >= quorum(len(terms.all_voters))
        if height.whole:
            height.candidate, height.halted = None, ""
            if terms.tentative:
                self._reopen(())
                for voter in terms.all_voters:
                    if voter != me:
                        self._ask_tip(voter)
            if self.head.is_final:
                self._troubled_at_ms = None
            self._choose_tip()
        elif waiting:
            self._choose_side(hearing)
        if self._troubled_at_ms is None and (height.halted or not self.head.is_final):
            self._troubled_at_ms = self._now_ms
        self._probe()

    def _choose_side(self, hearing: Mapping[PeerId, frozenset[PeerId]]) -> None:
        """Begin, or change, a tentative attempt once it is clear with whom."""
        terms, height, me = self._round.context.terms, self._height, self._signer.peer_id
        on_tip = {peer for peer in hearing if peer == me or self._ears.is_on(peer, self.head.hash)}
        here = {peer: others for peer, others in hearing.items() if peer in on_tip}
        side = side_with(here, Terms(self.head).leaders, me)
        if height.candidate is None or height.candidate[0] != side:
            height.candidate = (side, self._now_ms)
        if self._now_ms < height.candidate[1] + 2 * self.head.run.config.protocol.resend_ms or side == terms.side:
            return
        num_voters = len(terms.all_voters)
        if may_go_on(self.head, side):
            height.halted = ""
            text = f"{len(side)} of {num_voters} voters can be reached: going on with tentative certificates until the rest can be"
            self._tell_once("tentative", text, "warning")
            self._reopen(side)
            return
        height.halted = (
            f"only {len(side)} of {num_voters} voters can be reached and {quorum(num_voters)} are needed: this node waits"
        )
        self._tell_once("halted", height.halted, "warning")
        if terms.tentative:
            self._reopen(())

    def _reopen(self, side: tuple[PeerId, ...]) -> None:
        """Another ballot of the open round, with all that is known of it."""
        before = self._round
        stash = self._close()
        self._open(Terms(self.head, side), [], stash=stash, before=before)
        if side:
            others = set(self.terms.eligible) - set(self.terms.all_voters)
            self._round.context.send_once(sorted(others), self._my_side(asks=False))

    def _my_side(self, *, asks: bool) -> Signed:
        terms, head = self._round.context.terms, self.head
        voters = terms.all_voters
        heard = self._ears.heard(voters)
        marks = bitmap({place for place, peer in enumerate(voters) if peer in heard}, len(voters))
        body = Side(
            head.run.run_id, head.epoch, terms.round, terms.height, head.hash, marks, terms.side_bitmap, asks
        )
        return sign(self._signer, body)

    def _probe(self) -> None:
        """Ask quiet voters for a sign of life; say who is heard while a quorum is not."""
        if not self._probes or self._now_ms < self._next_probe_at_ms:
            return
        terms = self._round.context.terms
        self._next_probe_at_ms = self._now_ms + terms.config.protocol.resend_ms
        receivers = set(self._ears.quiet(terms.all_voters, self._now_ms))
        if not self._height.whole:
            receivers |= set(terms.all_voters)
        if terms.tentative:
            receivers |= set(terms.eligible)
        if receivers:
            self._round.context.send_once(sorted(receivers), self._my_side(asks=True))

    def _side(self, sender: PeerId, signed: Signed, side: Side) -> None:
        """A voter says whom it hears. Raises RemoteProtocolError."""
        terms = self._round.context.terms
        if side.run != self.head.run.run_id or signed.peer != sender:
            raise RemoteProtocolError(sender, "a side of another run or peer")
        if sender not in terms.all_voters:
            return
        check_signature(signed, self._verifier)
        voters = terms.all_voters
        if (side.epoch, side.height) == (self.head.epoch, terms.height):
            heard = frozenset(voters[place] for place in bits(side.heard, len(voters)))
            self._ears.declared[sender] = (heard, side.tip)
            if side.asks and heard != set(voters):
                self._ears.asked(self._now_ms)
            self._follow_side(sender, side)
        if side.tip != self.head.hash:
            self._ask_sometimes(sender)
        if side.asks and self._signer.peer_id in voters and self._inbox.may_answer(
            sender, _SIDES, self._now_ms, terms.config.protocol.resend_ms // 2
        ):
            self._round.context.send_once([sender], self._my_side(asks=False))

    def _follow_side(self, sender: PeerId, side: Side) -> None:
        """A member that does not vote takes part in the ballot that a voter it knows of is in."""
        terms = self._round.context.terms
        if self._signer.peer_id in terms.all_voters or side.tip != self.head.hash:
            return
        named = side_of(self.head, side.side) if side.side else ()
        if named == terms.side or (terms.tentative and sender not in terms.side):
            return
        if not named or (sender in named and may_go_on(self.head, named)):
            self._reopen(named)

    def _tell_once(self, what: str, text: str, level: str) -> None:
        if what not in self._height.told:
            self._height.told.add(what)
            self._round.context.notify(text, level)

    # --- recovery ----------------------------------------------------------------------------------------------------

    def _recovery_due_ms(self) -> int | None:
        """When this peer makes a new epoch by itself."""
        if self._troubled_at_ms is None or not self._holds_key or not self._round.context.is_member:
            return None
        if not self.head.run.config.protocol.recovers_by_itself:
            return None
        return self._troubled_at_ms + RECOVERY_MS

    @property
    def _holds_key(self) -> bool:
        key = self._wishes.recovery
        return key is not None and key.peer_id == self.head.run.manifest.recovery_key

    def _recover(self, keep: Iterable[PeerId]) -> None:
        """Make a new epoch with these members and this peer, if no final certificate is in sight."""
        context, key = self._round.context, self._wishes.recovery
        if key is None or not self._holds_key:
            context.notify("this node does not hold the run's recovery key", "error")
            return
        if self._troubled_at_ms is None or not context.is_member:
            context.notify("a recovery is for a run that cannot go on: this one can", "error")
            return
        kept = {*keep, context.me} & set(context.terms.members)
        context.notify(f"recovery: epoch {self.head.epoch + 1} begins with {len(kept)} members", "warning")
        self._finish(self.head, sign_recovery(recover(Terms(self.head), kept), key))

    def _recover_if_due(self) -> None:
        due_ms = self._recovery_due_ms()
        if due_ms is not None and self._now_ms >= due_ms:
            terms = self._round.context.terms
            heard = self._ears.heard(terms.all_voters) | (terms.live - set(terms.all_voters))
            self._recover(heard)

    # --- tips --------------------------------------------------------------------------------------------------------

    def _ask_tip(self, peer: PeerId) -> None:
        head = self._height.shown.get(peer, self.head)  # what it has shown of another branch: the rest of that
        ask = TipAsk(head.epoch, head.round + 1, head.last_final.round, head.hash)
        self._round.context.emit(self._outbox.once(peer, encode(ask)))

    def _answer_tip(self, sender: PeerId, ask: TipAsk) -> None:
        context = self._round.context
        pause_ms = context.terms.config.protocol.resend_ms // 2
        answer = answer_tip(self.head, ask)
        for number in answer.certificates[:_CERTIFICATES_PER_ANSWER]:
            if self._inbox.may_answer(sender, number, self._now_ms, pause_ms):
                self._send_certificate(sender, number)
        if answer.everything and self._inbox.may_answer(sender, self.terms.round, self._now_ms, pause_ms):
            for data in self._round.everything(sender):
                context.emit(self._outbox.once(sender, data))
        if answer.asks_back:
            self._ask_sometimes(sender)

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
        self._recover_if_due()
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
