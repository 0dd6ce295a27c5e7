"""One open round: joins the keepers of statements, cuts, part results, bodies and votes; decides when to act."""

from __future__ import annotations

from contextlib import suppress

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.bodies import Bodies
from spes_p2p.protocol.body import Body, Cut, Entry
from spes_p2p.protocol.codec import (
    body_hash,
    check_signature,
    cut_hash,
    decode_as,
    decode_signed,
    encode,
)
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.cuts import Cuts
from spes_p2p.protocol.effects import Input
from spes_p2p.protocol.head import served_by
from spes_p2p.protocol.history import Held, History
from spes_p2p.protocol.leading import Leader
from spes_p2p.protocol.messages import (
    Ack,
    Alive,
    BodyMessage,
    Claim,
    CutMessage,
    Evidence,
    HalfIn,
    Join,
    Leave,
    Manifest,
    Message,
    Offer,
    PartDigest,
    ProposalMessage,
    Receipt,
    Ref,
    Refusal,
    Seen,
    Signed,
    ViewChange,
    Vote,
    Want,
)
from spes_p2p.protocol.parts import Parts
from spes_p2p.protocol.relay import Relay
from spes_p2p.protocol.stash import Stash
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.voting import Voting
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind, RefusalReason, Wire

_MAX_OFFERS_PER_PEER = 2048
"""Objects asked for in a round because one peer offered them."""

_MAX_ANSWERED_REFS = 64
"""Objects sent for one `Want`, which costs its sender far less than they do; honest ones ask for one at a time."""


class OpenRound:
    """Everything of the round that is open."""

    def __init__(self, context: Context, history: History) -> None:
        self.context = context
        self.updates = Updates(context, history)
        self.cuts = Cuts(context, self.updates)
        self.parts = Parts(context, self.updates)
        self.bodies = Bodies(context, self.updates, self.cuts, self.parts)
        self.voting = Voting(context, self.updates, self.cuts, self.parts, self.bodies)
        self.leader = Leader(context, self.updates, self.cuts, self.parts, self.bodies, self.voting)
        self.will_train = False
        self.training = False
        self.training_ended_at_ms: int | None = None
        self.stop_sent = False
        self.inherited: Stash | None = None
        """What an earlier ballot of this round left."""
        self._half_told = False
        self._offered: dict[PeerId, set[Ref]] = {}
        self._offers_taken: dict[PeerId, int] = {}
        self.relay = Relay(context, self.voting, self.bodies)
        self._next_gossip_at_ms = context.opened_at_ms + context.terms.config.protocol.resend_ms

    def restore(self) -> None:
        """Take up the round where the journal, which the context has, left it."""
        kept = self.context.kept.entries()
        for slot, data in (*self.context.ballot.entries().items(), *kept.items()):
            if slot.startswith(("cut-body/", "cut/")):
                cut = decode_as(Cut, data)
                if cut.round == self.context.terms.round:
                    self.cuts.learn(cut, self.context.terms.voters)
            elif slot.startswith("item/"):
                with suppress(RemoteProtocolError):  # of another ballot of the round
                    self.updates.add(decode_signed(data))
        for known in list(self.cuts.known.values()):
            self.cuts.resolve(known)  # now it asks for the receipts that are kept
        for slot, data in kept.items():
            if slot.startswith("receipt/"):
                with suppress(RemoteProtocolError):
                    self.updates.add_receipt(decode_as(Receipt, data))
        self.voting.restore()

    # --- own statements and results ----------------------------------------------------------------------------------

    def say(self, signed: Signed) -> None:
        """Publish an own statement."""
        self.updates.add(signed)
        self.context.send(self.context.terms.audience, signed)

    def resume_update(self) -> bool:
        """After a restart, send the journalled update again instead of training twice for one round."""
        context = self.context
        head, row = context.terms.head, context.terms.head.state.row(context.me)
        for number, base in head.recent:
            late = context.updates_on(base).promised(f"manifest/{number + 1}")
            if late is not None and row is not None and row.base_round <= number < head.round:
                self.say(late)
        promised = context.updates_on(head.hash).promised(f"manifest/{head.round + 1}")
        if promised is None:
            return False
        self.training_ended_at_ms = self.context.now_ms
        self.say(promised)
        return True

    def local(self, event: Input) -> None:
        """A result of local work."""
        match event:
            case fx.Trained():
                self._trained(event)
            case fx.PieceChecked():
                self.updates.piece_checked(event.manifest, event.piece, event.reason)
            case fx.BlobHeld():
                self.context.held.add(event.blob)
            case fx.Aggregated() if event.recheck:
                self.parts.rechecked(event.updates, event.part, event.digest)
            case fx.Aggregated():
                self.parts.aggregated(event.updates, event.part, event.digest)
            case fx.Ranked():
                self.leader.ranked(event.cut, event.merge_lists)
            case fx.RankingChecked():
                self.bodies.ranking_checked(event.body, event.problem)
            case _:
                pass

    def _trained(self, event: fx.Trained) -> None:
        """Publish the update, or say that there will be none; a result of an older round becomes a late update."""
        context = self.context
        head = context.terms.head
        prev, row = dict(head.recent).get(event.round - 1), head.state.row(context.me)
        if event.base is not None and event.base != prev:
            return  # trained on a branch that was left
        current = event.round == context.terms.round
        if current:
            self.training = False
            self.training_ended_at_ms = context.now_ms
        if row is None or prev is None or event.round > context.terms.round:
            return
        if event.round <= row.base_round or (ItemKind.UPDATE, context.me, event.round) in self.updates.slots:
            return  # there is an update for this slot already; a second one would be equivocation
        if not event.pieces:
            if current:
                alive = Alive(head.run.run_id, head.epoch, context.terms.round, False)
                self.say(context.sign_once("alive-no-more", alive))
            return
        manifest = Manifest(
            head.run.run_id,
            head.epoch,
            event.round,
            prev,
            event.tokens,
            event.steps,
            event.loss_micronats,
            event.pieces,
        )
        context.held.update(piece.blob for piece in event.pieces)
        self.say(context.updates_on(prev).sign_once(f"manifest/{event.round}", manifest))

    # --- messages ----------------------------------------------------------------------------------------------------

    def remote(self, sender: PeerId, message: Message) -> None:
        """A message of this round. Raises RemoteProtocolError."""
        terms = self.context.terms
        if isinstance(message, Signed):
            self._signed(sender, message)
            return
        if sender not in terms.member_set:
            return  # left or not yet joined: nothing of it counts
        match message:
            case Receipt():
                self.updates.add_receipt_or_keep(message, sender)
            case CutMessage():
                self.cuts.add(message, sender)
            case ProposalMessage():
                self.voting.add_proposal(message, sender)
            case BodyMessage():
                self._wanted_body(sender, message)
            case Cut():
                if self.context.is_wanted(Ref(RefKind.CUT, cut_hash(message), NO_DIGEST)):
                    self.cuts.learn(message, [sender])
            case Offer():
                self._take_offer(sender, message)
            case Want():
                self._answer(sender, message)
            case HalfIn():
                self.updates.told_half(sender)
            case Seen():
                self.relay.answer(sender, message)
            case _:
                pass

    def _signed(self, sender: PeerId, signed: Signed) -> None:
        body, head = signed.body, self.context.terms.head
        if (body.run, body.epoch) != (head.run.run_id, head.epoch):
            raise RemoteProtocolError(sender, f"{body.tag} of another run or epoch")
        match body:
            case Manifest() | Alive() | Join() | Leave() | Claim() | Evidence():
                self.updates.add(signed)
            case Ack():
                self.updates.add_ack(signed)
            case Refusal():
                self._refused(signed, body)
            case PartDigest():
                self.parts.add(signed)
            case Vote() if self.context.in_ballot(body):
                self.voting.add_vote(signed)
            case ViewChange() if self.context.in_ballot(body):
                self.voting.add_wish(signed)
            case Vote() | ViewChange():
                raise RemoteProtocolError(sender, f"a {body.tag} of another ballot")
            case _:
                raise RemoteProtocolError(sender, f"a bare {body.tag}")

    def late(self, sender: PeerId, message: Message) -> None:
        """A message of an older round: statements, acks and receipts still count."""
        members = self.context.terms.member_set
        if sender not in members and not isinstance(message, Signed):
            return
        if isinstance(message, Signed):
            kept = isinstance(message.body, Join) or message.peer in members  # its author may have left since
            if kept and isinstance(message.body, Manifest | Join | Leave | Claim | Evidence | Ack | Refusal):
                self._signed(sender, message)
        elif isinstance(message, Receipt):
            self.updates.add_late_receipt(message, sender)

    def _refused(self, signed: Signed, refusal: Refusal) -> None:
        held = self.updates.by_hash.get(refusal.manifest)
        if held is None or held.signed.peer != self.context.me or signed.peer in held.refused_by:
            return
        manifest = held.manifest
        if manifest is None or signed.peer not in self.context.terms.members:
            return  # anybody can make keys; only members acknowledge
        check_signature(signed, self.context.verifier)
        held.refused_by[signed.peer] = refusal.reason
        if list(held.refused_by.values()).count(refusal.reason) == self.context.terms.num_faults + 1:
            self.context.emit(fx.UpdateRefused(round=manifest.round, reason=refusal.reason))
        reason = refusal.reason.name.lower().replace("_", " ")
        self.context.notify(f"a peer refused this node's update of round {manifest.round}: {reason}", "warning")

    def _take_offer(self, sender: PeerId, offer: Offer) -> None:
        """Ask for what is news, up to a number per peer: an offer costs its sender nothing."""
        for ref in offer.refs:
            taken = self._offers_taken.get(sender, 0)
            if taken < _MAX_OFFERS_PER_PEER and self.updates.lacks(ref):
                self._offers_taken[sender] = taken + 1
                self.context.want(ref, [sender])

    def _wanted_body(self, sender: PeerId, message: BodyMessage) -> None:
        if self.context.is_wanted(Ref(RefKind.BODY, body_hash(message.body), NO_DIGEST)):
            self.bodies.learn(message.body, message.merge_lists, [sender])

    def _answer(self, sender: PeerId, want: Want) -> None:
        """Send the objects that a peer asks for, as far as they are here: each once, and up to a number."""
        for ref in list(dict.fromkeys(want.refs))[:_MAX_ANSWERED_REFS]:
            for message in self._objects(ref):
                self.context.emit(self.context.outbox.once(sender, encode(message)))

    def _objects(self, ref: Ref) -> list[Wire]:
        match ref.kind:
            case RefKind.STATEMENT:
                held = self.updates.by_hash.get(ref.hash)
                return [held.signed] if held else []
            case RefKind.RECEIPT:
                receipt = self.updates.receipts.get(ref.hash)
                return [receipt] if receipt else []
            case RefKind.CUT:
                cut = self.cuts.signed_or_bare(ref.hash)
                return [cut] if cut else []
            case RefKind.BODY:
                body = self.bodies.known.get(ref.hash)
                return [BodyMessage(body.body, body.merge_lists)] if body else []
            case _:  # digests
                return list(self.parts.all_signed(ref.hash))

    def everything(self, peer: PeerId) -> list[bytes]:
        """All messages of this round, for a member that came back."""
        terms = self.context.terms
        if peer not in terms.member_set:
            return []
        if peer not in terms.audience:
            return [encode(self._half())] if self.updates.half_at_ms is not None else []
        found: list[bytes] = []
        for held in self.updates.slots.values():
            found.append(encode(held.signed))
            if held.receipt is not None:
                found.append(encode(held.receipt))
        if peer in terms.eligible_set:
            for view, announcement in sorted(self.cuts.announced.items()):
                cut = self.leader.cut_of_view(view)
                if cut is not None:
                    found.append(encode(CutMessage(announcement, cut.cut)))
        if peer in terms.voter_set:
            found += [encode(signed) for signed in self.parts.everything()]
            found += [data for _, data in self.voting.log]
        return found

    # --- acting ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do everything that is due."""
        self._stop_training()
        self._tell_half()
        self._begin_view0()
        self.leader.lead()
        for known in list(self.cuts.known.values()):
            self.cuts.resolve(known)
            self.parts.work(known, max(self.voting.view, 0))
        self.leader.lead()
        for body in list(self.bodies.known.values()):
            self.bodies.examine(body)
        self.voting.tick()

    def drags_on(self) -> bool:
        """Whether the round has needed a second view, or is older than training and transfers may take."""
        terms = self.context.terms
        limit_ms = terms.config.protocol.round_max_ms + terms.transfer_budget_ms
        return self.voting.view >= 1 or self.context.now_ms - self.context.opened_at_ms > limit_ms

    def tick(self) -> None:
        """What is repeated from time to time."""
        self.updates.tick()
        if self.context.now_ms >= self._next_gossip_at_ms:
            self._next_gossip_at_ms = self.context.now_ms + self.context.terms.config.protocol.resend_ms
            if self.context.is_voter:
                self._offer()
                self.relay.ask()

    def _tell_half(self) -> None:
        """Let the members that do not get manifests know that half of them are in."""
        terms = self.context.terms
        if self.updates.half_at_ms is None or self._half_told or self.context.me not in terms.criers:
            return
        self._half_told = True
        others = terms.member_set.difference(terms.audience)
        self.context.send(sorted(others), self._half())

    def _half(self) -> HalfIn:
        return HalfIn(self.context.terms.head.epoch, self.context.terms.round)

    def _stop_training(self) -> None:
        due = self._stop_training_at_ms()
        if self.training and not self.stop_sent and due is not None and self.context.now_ms >= due:
            self.stop_sent = True
            self.context.emit(fx.StopTraining(round=self.context.terms.round))

    def _stop_training_at_ms(self) -> int | None:
        context = self.context
        protocol = context.terms.config.protocol
        due = context.opened_at_ms + protocol.round_max_ms
        half_at = self.updates.half_at_ms
        if half_at is not None and len(context.terms.members) > 2:
            due = min(due, half_at + protocol.train_grace_ms)
        return due if self.training else None

    def _view0_due_ms(self) -> int | None:
        """When view 0 begins at the latest; not before this peer's own training has ended, or should have."""
        if self.training:
            protocol = self.context.terms.config.protocol
            return self.context.opened_at_ms + protocol.round_max_ms + protocol.train_grace_ms
        return self.cuts.view0_due_ms(self.training_ended_at_ms)

    def _begin_view0(self) -> None:
        if self.voting.view >= 0 or not self.context.terms.voters:
            return
        due = self._view0_due_ms()
        if self.cuts.all_live_in() or (due is not None and self.context.now_ms >= due):
            self.voting.begin(self.voting.first)

    def _offer(self) -> None:
        """Point the leaders of this view and the next to what is held, as hashes."""
        terms, view = self.context.terms, max(self.voting.view, 0)
        for leader in sorted({terms.leader(view), terms.leader(view + 1)} - {self.context.me}):
            known = self._offered.setdefault(leader, set())
            refs = [ref for ref, author, _ in self.updates.refs() if author != leader and ref not in known]
            known.update(refs)
            if refs:
                self.context.send([leader], Offer(terms.head.epoch, terms.round, tuple(refs)))

    def deadline_ms(self) -> int | None:
        """When something is due next."""
        context = self.context
        protocol, budget = context.terms.config.protocol, context.terms.transfer_budget_ms
        candidates: list[int | None] = [
            context.deadline_ms(),
            self.updates.deadline_ms(),
            self.voting.deadline_ms(),
            self.voting.wakes_at_ms(),
            self._stop_training_at_ms() if not self.stop_sent else None,
            self._next_gossip_at_ms if context.is_voter else None,
        ]
        if self.voting.view < 0:
            candidates.append(self._view0_due_ms())
        else:
            began = self.voting.began_at_ms[self.voting.view]
            candidates += [context.opened_at_ms + protocol.round_min, began + budget]
            announced_at_ms = self.cuts.announced_at_ms.get(self.voting.view)
            candidates.append(None if announced_at_ms is None else announced_at_ms + budget)
        for known in self.cuts.known.values():
            at = known.received_at_ms
            candidates += [at + budget // 2, at + budget - protocol.view_timeout(0) // 2, at + budget]
        for body in self.bodies.known.values():
            patience = protocol.view_timeout(max(self.voting.view, 0)) // 2
            candidates += [body.received_at_ms + patience]
            candidates += [self.voting.began_at_ms.get(self.voting.view, 0) + patience]
            if body.fetched_at_ms is not None and not body.held:
                candidates.append(body.fetched_at_ms + protocol.resend_ms)
        return min((at for at in candidates if at is not None and at > context.now_ms), default=None)

    # --- at the end of the round -------------------------------------------------------------------------------------

    def _held_entries(self, body: Body) -> list[tuple[int, Entry, Held]]:
        found = []
        for place, entry in enumerate(body.entries):
            held = self.updates.by_hash.get(entry.statement)
            if held is not None:
                found.append((place, entry, held))
        return found

    def accepted(self, body: Body) -> list[Held]:
        """Updates of the certificate whose psi delta counts."""
        refused = {remark.entry for remark in body.refused if remark.reason is RefusalReason.SUPERSEDED}
        return [
            held
            for place, entry, held in self._held_entries(body)
            if entry.kind is ItemKind.UPDATE and place not in refused
        ]

    def updates_in(self, body: Body) -> list[Held]:
        """Updates of a certificate's cut that are held, accepted or not."""
        return [held for _, entry, held in self._held_entries(body) if entry.kind is ItemKind.UPDATE]

    def left_over(self, body: Body) -> list[Held]:
        """Statements that were not served by the certificate and may be items of the next cut."""
        done = set(served_by(body))
        return [
            held
            for (kind, _, _), held in self.updates.slots.items()
            if kind is not ItemKind.ALIVE and held.hash not in done
        ]

    def carry(self, held: Held) -> None:
        """Take over a statement of the previous round. Raises RemoteProtocolError if it is no longer valid."""
        body = held.signed.body
        state = self.context.terms.head.state
        row = state.row(held.signed.peer)
        if isinstance(body, Join) and row is not None:
            return
        if isinstance(body, Manifest) and (row is None or body.round <= row.base_round):
            return
        self.updates.carry(held)
        if held.signed.peer == self.context.me:
            self.context.send(self.context.terms.audience, held.signed)  # those of the last round have it

    def handovers(self, cut: Digest) -> tuple[tuple[PeerId, Digest, int], ...]:
        """(leaver, blob, bytes) of every hand-over that the cut names."""
        known = self.cuts.known.get(cut)
        items = known.items if known is not None and known.items is not None else ()
        return tuple(
            (item.signed.peer, item.signed.body.handover, item.signed.body.handover_bytes)
            for item in items
            if isinstance(item.signed.body, Leave) and item.signed.body.handover != NO_DIGEST
        )

    def joiners(self) -> tuple[PeerId, ...]:
        """Peers that ask to join in this round."""
        return tuple(sorted(peer for kind, peer, _ in self.updates.slots if kind is ItemKind.JOIN))
