"""Propose, prevote, precommit: Tendermint's voting with the quorum certificate inside the proposal.

Rules, and where they are (docs/protocol.md, sections 4 and 5):

    view 0 begins                  when the cuts' timing says so                      RoundMachine
    view v > 0 begins              when q voters have signed View >= v                `_enter_due_view`
    a voter signs View{v + 1}      on its time-out in v, and when f + 1 signed more   `tick`, `_follow_views`
    prevote                        once per view, after the checks; nil if one fails  `_try_prevote`
    lock and precommit             on q prevotes of the view, f + 1 *held*            `_try_precommit`
    decided                        on q precommits of one view                        `decided`

"View 0" in the documentation is the *first view* of the round here: the final voting lasts over all tentative rounds of
a height, and each of them begins with the view that was reached before. `Voting` of a tentative attempt is its own.

A lock is released only by a proposal whose quorum certificate is of a later view, or of the locked body itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import msgspec

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.bodies import Bodies, KnownBody
from spes_p2p.protocol.body import Certificate, base_of
from spes_p2p.protocol.certificate import make_certificate, make_qc, verify_qc, votes_of_qc
from spes_p2p.protocol.codec import body_hash, check_signature, decode_as, decode_signed, encode
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.cuts import Cuts, KnownCut
from spes_p2p.protocol.evidence import conflicting
from spes_p2p.protocol.messages import (
    BodyMessage,
    Proposal,
    ProposalMessage,
    QuorumCertificate,
    Ref,
    Signed,
    ViewChange,
    Vote,
)
from spes_p2p.protocol.params import MAX_VIEWS_AHEAD
from spes_p2p.protocol.parts import Parts
from spes_p2p.protocol.transition import Transition
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.wire import NO_DIGEST, RefKind, Step

_MAX_LOGGED_WISHES = 256
"""View changes of one voter that are passed on in a round: more views than any round needs."""

Votes = dict[int, dict[PeerId, Signed]]


@dataclass(frozen=True, slots=True)
class Lock:
    """The body this voter precommitted, and in which view."""

    view: int
    body: Digest


class Voting:
    """The votes of one round."""

    def __init__(self, context: Context, updates: Updates, cuts: Cuts, parts: Parts, bodies: Bodies) -> None:
        self._context = context
        self._updates = updates
        self._cuts = cuts
        self._parts = parts
        self._bodies = bodies
        self.view = -1
        """-1: the first view has not begun here."""
        self.first = 0
        """The view that this round begins with."""
        self._spoiled = False
        """The first view has seen votes on another tip: nothing can come of it here."""
        self.began_at_ms: dict[int, int] = {}
        self.lock: Lock | None = None
        self.qc: QuorumCertificate | None = None
        """The highest known."""
        self.proposals: dict[int, Signed] = {}
        self.votes: dict[Step, Votes] = {Step.PREVOTE: {}, Step.PRECOMMIT: {}}
        self.wishes: dict[PeerId, Signed] = {}
        """Per voter, the highest view it asks for."""
        self._counted: dict[int, int] = {}
        """Per view, how many prevotes there were when quorums were last looked for."""
        self._wished = 0
        self.log: list[tuple[PeerId, bytes]] = []
        """(author, message): votes, wishes and proposals of all, in order of arrival, for those who miss them."""
        self._logged_wishes: dict[PeerId, int] = {}

    def restore(self) -> None:
        """Take up the round where the journal left it: the same view, lock, and votes, sent again as they were."""
        context = self._context
        entries = context.ballot.entries()
        for slot, data in entries.items():
            if slot.startswith("body/"):
                message = decode_as(BodyMessage, data)
                self._bodies.learn(message.body, message.merge_lists, context.terms.voters)
        if "qc" in entries:
            self.qc = msgspec.msgpack.decode(entries["qc"], type=QuorumCertificate)
            if self.qc.body not in self._bodies.known:
                context.want(Ref(RefKind.BODY, self.qc.body, NO_DIGEST), context.terms.voters)
        if "lock" in entries:
            view, body = entries["lock"].decode().split()
            self.lock = Lock(int(view), Digest(bytes.fromhex(body)))
        if "view" in entries:
            reached, first, tip = entries["view"].decode().split()
            if tip == context.terms.head.hash.hex():
                self.view, self.first = int(reached), int(first)
                self.began_at_ms[self.view] = context.now_ms
            else:
                self.first = int(reached)
        for slot, data in entries.items():
            if slot.startswith(("signed/vote/", "signed/wish/")):
                signed = decode_signed(data)
                context.send(context.terms.voters, signed)
                if isinstance(signed.body, ViewChange):
                    self._wished = max(self._wished, signed.body.view)
                    self.add_wish(signed)
                else:
                    self.add_vote(signed)
        if self.view < 0:
            self.first = max(self.first, self._wished)
            slots = ("cut/{}", "proposal/{}", "vote/{}/0", "vote/{}/1")
            self._spoiled = any("signed/" + slot.format(self.first) in entries for slot in slots)
        self._cuts.view = self._here

    @property
    def _here(self) -> int:
        """The open view, or the one before the first that is to begin."""
        return self.view if self.view >= 0 else self.first - 1

    # --- views -------------------------------------------------------------------------------------------------------

    def begin(self, view: int) -> None:
        """Enter a view."""
        if self.view < 0:
            self.first = view
        self.view = self._cuts.view = view
        self.began_at_ms[view] = self._context.now_ms
        tip = self._context.terms.head.hash.hex()
        self._context.ballot.persist("view", f"{view} {self.first} {tip}".encode())
        if view == self.first and (self._spoiled or self._proposed_elsewhere(view)):
            self._wish(view + 1)
        self._revote()

    def _proposed_elsewhere(self, view: int) -> bool:
        """Whether the leader of a view has used it for a body on another tip."""
        signed = self.proposals.get(view)
        if signed is None or not isinstance(signed.body, Proposal):
            return False
        known = self._bodies.known.get(signed.body.body)
        return known is not None and known.foreign

    def pinned_base(self) -> Digest | None:
        """The tip that the highest quorum certificate, or this voter's lock, binds the final voting to."""
        bound = self.qc.body if self.qc is not None else self.lock.body if self.lock is not None else None
        known = self._bodies.known.get(bound) if bound is not None else None
        return base_of(known.body) if known is not None else None

    def deadline_ms(self) -> int | None:
        """When the open view times out."""
        if self.view < 0 or not self._context.is_voter:
            return None
        terms = self._context.terms
        timeout = terms.config.protocol.view_timeout(self.view)
        budget = terms.transfer_budget_ms
        cut_at = self._cuts.announced_at_ms.get(self.view)
        if cut_at is not None:
            return max(cut_at, self.began_at_ms[self.view]) + budget + timeout
        return self.began_at_ms[self.view] + (budget if self.view == self.first else 0) + timeout

    def tick(self) -> None:
        """Ask for the next view if the open one timed out; vote where a wait is over."""
        deadline = self.deadline_ms()
        if deadline is not None and self._context.now_ms >= deadline:
            self._wish(self.view + 1)
        self._revote()

    def _wish(self, view: int) -> None:
        """Sign and send View{view}, once."""
        context = self._context
        if not context.is_voter or view <= self._wished:
            return
        self._wished = view
        head = context.terms.head
        body = ViewChange(head.run.run_id, head.epoch, context.terms.ballot_round, view, self.qc, context.terms.branch)
        signed = context.ballot.sign_once(f"wish/{view}", body)
        context.send(context.terms.voters, signed)
        self.add_wish(signed)

    def add_wish(self, signed: Signed) -> None:
        """A voter asks for a view. Raises RemoteProtocolError."""
        body, context = signed.body, self._context
        if not isinstance(body, ViewChange) or signed.peer not in context.terms.voter_set:
            raise RemoteProtocolError(signed.peer, "a view change of a peer that does not vote")
        before = self.wishes.get(signed.peer)
        if before is not None and isinstance(before.body, ViewChange) and before.body.view >= body.view:
            if conflicting(before, signed):
                check_signature(signed, context.verifier)
                self._updates.accuse(before, signed)
            return
        check_signature(signed, context.verifier)
        if body.qc is not None:
            self._learn_qc(body.qc, signed.peer)
        self.wishes[signed.peer] = signed
        logged = self._logged_wishes.get(signed.peer, 0)
        if logged < _MAX_LOGGED_WISHES:
            self._logged_wishes[signed.peer] = logged + 1
            self.log.append((signed.peer, encode(signed)))
        self._follow_views()

    def _asked_views(self) -> list[int]:
        """Views asked for, highest first, one per voter."""
        bodies = [signed.body for signed in self.wishes.values()]
        return sorted((body.view for body in bodies if isinstance(body, ViewChange)), reverse=True)

    def _follow_views(self) -> None:
        terms = self._context.terms
        asked = self._asked_views()
        if len(asked) > terms.num_faults and asked[terms.num_faults] > max(self.view, self._wished):
            self._wish(asked[terms.num_faults])
            asked = self._asked_views()
        if len(asked) >= terms.quorum and asked[terms.quorum - 1] > self.view:
            self.begin(asked[terms.quorum - 1])

    # --- quorum certificates -----------------------------------------------------------------------------------------

    def _learn_qc(self, qc: QuorumCertificate, source: PeerId) -> None:
        """A quorum certificate of anybody; the body is asked for if it is not known. Raises RemoteProtocolError."""
        if self.qc is None or qc.view > self.qc.view:
            verify_qc(self._context.terms, qc, self._context.verifier)
            self.compare(votes_of_qc(self._context.terms, qc))
            self.qc = qc
            self._context.ballot.persist("qc", encode(qc))
        if qc == self.qc and qc.body not in self._bodies.known:
            self._context.want(Ref(RefKind.BODY, qc.body, NO_DIGEST), [source])

    # --- proposing ---------------------------------------------------------------------------------------------------

    def propose(self, known: KnownBody) -> None:
        """As leader of the open view, propose a body, with the quorum certificate it builds on if there is one."""
        context = self._context
        head = context.terms.head
        qc = self.qc if self.qc is not None and self.qc.body == known.hash else None
        terms = context.terms
        body = Proposal(head.run.run_id, head.epoch, terms.ballot_round, self.view, known.hash, qc, terms.branch)
        context.ballot.persist(f"body/{known.hash.hex()}", encode(BodyMessage(known.body, known.merge_lists)))
        signed = context.ballot.sign_once(f"proposal/{self.view}", body)
        message = ProposalMessage(signed, known.body, known.merge_lists)
        context.send(context.terms.voters, message)
        self.add_proposal(message, context.me)

    def add_proposal(self, message: ProposalMessage, sender: PeerId) -> None:
        """A leader's proposal. Raises RemoteProtocolError."""
        signed, context = message.proposal, self._context
        body = signed.body
        if not isinstance(body, Proposal) or signed.peer != context.terms.leader(body.view):
            raise RemoteProtocolError(signed.peer, "a proposal by a peer that does not lead its view")
        if not context.in_ballot(body):
            raise RemoteProtocolError(signed.peer, "a proposal for another round")
        if body.view > self._here + MAX_VIEWS_AHEAD:
            return
        before = self.proposals.get(body.view)
        if before is not None and before.body == body:
            return
        check_signature(signed, context.verifier)
        if before is not None:
            self._updates.accuse(before, signed)
            return
        if body_hash(message.body) != body.body:
            raise RemoteProtocolError(sender, "a proposal with another body than it names")
        if body.qc is not None:
            if body.qc.body != body.body or body.qc.view >= body.view:
                raise RemoteProtocolError(signed.peer, "a proposal that contradicts its quorum certificate")
            verify_qc(context.terms, body.qc, context.verifier)
        self._bodies.learn(message.body, message.merge_lists, (signed.peer, sender))
        if body.qc is not None:
            self._learn_qc(body.qc, signed.peer)
        self.proposals[body.view] = signed
        self.log.append((signed.peer, encode(message)))
        self._revote()

    # --- voting ------------------------------------------------------------------------------------------------------

    def add_vote(self, signed: Signed) -> None:
        """A vote of any voter. Raises RemoteProtocolError."""
        body, context = signed.body, self._context
        if not isinstance(body, Vote) or signed.peer not in context.terms.voter_set:
            raise RemoteProtocolError(signed.peer, "a vote of a peer that does not vote")
        if body.step is Step.PRECOMMIT and body.held:
            # a certificate's signatures are over precommits that do not: this one would spoil it
            raise RemoteProtocolError(signed.peer, "a precommit that says held")
        if body.view > self._here + MAX_VIEWS_AHEAD:
            return
        votes = self.votes[body.step].setdefault(body.view, {})
        before = votes.get(signed.peer)
        if before is not None:
            if before.body != body:
                check_signature(signed, context.verifier)
                self._updates.accuse(before, signed)
            return
        check_signature(signed, context.verifier)
        votes[signed.peer] = signed
        self.log.append((signed.peer, encode(signed)))
        if body.body != NO_DIGEST and body.body not in self._bodies.known:
            backers = self.votes_for(body.step, body.view, body.body)
            if len(backers) > context.terms.num_faults:  # one of them is honest and has it
                context.want(Ref(RefKind.BODY, body.body, NO_DIGEST), backers)
        self._revote()

    def compare(self, votes: Iterable[Signed]) -> None:
        """Votes that a verified quorum carries, with those that are held: two for one slot are evidence."""
        for signed in votes:
            vote = _vote(signed)
            before = self.votes[vote.step].get(vote.view, {}).get(signed.peer)
            if before is not None and conflicting(before, signed):
                self._updates.accuse(before, signed)

    def votes_for(self, step: Step, view: int, body: Digest) -> dict[PeerId, Signed]:
        """Votes of one step and view for one body."""
        found = self.votes[step].get(view, {})
        return {peer: signed for peer, signed in sorted(found.items()) if _vote(signed).body == body}

    def held_votes(self, view: int, body: Digest) -> int:
        """How many others' prevotes for a body say *held*."""
        votes = self.votes_for(Step.PREVOTE, view, body)
        return sum(1 for peer, signed in votes.items() if peer != self._context.me and _vote(signed).held)

    def _revote(self) -> None:
        """Cast every vote that is possible now."""
        if not self._context.is_voter or self.view < 0:
            self._watch_quorums()
            return
        self._try_prevote()
        self._watch_quorums()
        self._try_precommit()

    def _cast(self, step: Step, body: Digest, *, held: bool) -> None:
        context = self._context
        head = context.terms.head
        terms = context.terms
        vote = Vote(head.run.run_id, head.epoch, terms.ballot_round, self.view, step, body, held, terms.branch)
        signed = context.ballot.sign_once(f"vote/{self.view}/{int(step)}", vote)
        context.send(context.terms.voters, signed)
        self.add_vote(signed)

    def _voted(self, step: Step) -> bool:
        return self._context.me in self.votes[step].get(self.view, {})

    def _try_prevote(self) -> None:
        signed = self.proposals.get(self.view)
        proposal = signed.body if signed is not None else None
        if not isinstance(proposal, Proposal) or self._voted(Step.PREVOTE):
            return
        known = self._bodies.known[proposal.body]
        self._bodies.examine(known)
        verdict = self._judge(proposal, known)
        if verdict is None:
            return
        if verdict:
            self._context.notify(f"view {self.view}: prevote nil: {verdict}", "warning")
            self._cast(Step.PREVOTE, NO_DIGEST, held=False)
        else:
            self._keep(known)
            self._cast(Step.PREVOTE, known.hash, held=known.held)

    def _keep(self, known: KnownBody) -> None:
        """Journal a body and everything that its objective checks need, before the vote for it leaves.

        A quorum certificate binds all later leaders to its body. If its voters all crash, one of them must still be
        able to show the others what it was made of: the cut, its statements, and exactly these receipts.
        """
        context, cut = self._context, self._cuts.known[known.body.cut]
        context.ballot.persist(f"body/{known.hash.hex()}", encode(BodyMessage(known.body, known.merge_lists)))
        context.kept.persist(f"cut/{cut.hash.hex()}", encode(cut.cut))
        for item in cut.items or ():
            context.kept.persist(f"item/{item.entry.statement.hex()}", encode(item.signed))
            if item.entry.receipt != NO_DIGEST:
                receipt = self._updates.receipts[item.entry.receipt]
                context.kept.persist(f"receipt/{item.entry.receipt.hex()}", encode(receipt))

    def _judge(self, proposal: Proposal, known: KnownBody) -> str | None:
        """None: wait; empty: prevote it; else why the prevote is nil."""
        context = self._context
        if known.problem is not None:
            return known.problem
        if known.foreign:
            return None
        if self.lock is not None and self.lock.body != known.hash:
            released = proposal.qc is not None and proposal.qc.view >= self.lock.view
            if not released:
                return f"locked on another body since view {self.lock.view}"
        cut = self._bodies.cut_of(known)
        if not known.derived or not known.supported or cut is None or cut.transition is None:
            return None
        enough_hold = self.held_votes(self.view, known.hash) > context.terms.num_faults
        if not enough_hold and not (known.held and known.ranked):
            return None
        if proposal.qc is not None:
            return ""  # locks must be served: what only this voter knows or has recomputed does not count any more
        agreed = self._parts.recheck(cut.transition, self._bodies.kept(known), known.body.parts)
        if agreed is False:
            return "a recomputed part has another digest"
        patience = context.terms.config.protocol.view_timeout(self.view) // 2
        if agreed is None and context.now_ms < max(known.received_at_ms, self.began_at_ms[self.view]) + patience:
            return None
        if agreed is None:
            context.notify("the recheck of a part did not end in time", "warning")
        return self._judge_locally(known, cut, cut.transition)

    def _judge_locally(self, known: KnownBody, cut: KnownCut, transition: Transition) -> str | None:
        """Local knowledge, for a proposal without a quorum certificate only."""
        context = self._context
        protocol = context.terms.config.protocol
        first = self.view == self.first
        if first:
            before_ms = self.began_at_ms[self.view] - protocol.view_timeout(0)
        else:
            before_ms = self.began_at_ms.get(self.view - 1, self.began_at_ms[self.view] - protocol.view_timeout(0))
        missing = self._cuts.missing(cut.items or (), before_ms)
        if missing:
            return f"the cut leaves out {missing[0]}"
        hurry = self._cuts.judge_hurry(cut, self.began_at_ms[self.view]) if first else ""
        if hurry != "":
            return hurry
        kept = self._bodies.kept(known)
        if kept and transition.contributions:
            budget = context.terms.transfer_budget_ms
            since_ms = cut.received_at_ms + budget // 2 if first else before_ms
            if any(self._parts.agreed_before(transition.updates_hash, part, since_ms) for part in sorted(kept)):
                return "a part is kept although its digests agree"
            if first and context.now_ms < cut.received_at_ms + budget - protocol.view_timeout(0) // 2:
                return None
        age = context.now_ms - context.opened_at_ms
        if age < protocol.round_min and not self._cuts.all_live_in():
            return None
        return ""

    def wakes_at_ms(self) -> int | None:
        """When the leader may cut, or a prevote that waits may be cast, in the first view; past or to come."""
        if self.view < 0 or self.view != self.first or self._voted(Step.PREVOTE):
            return None
        began_at_ms = self.began_at_ms[self.view]
        return self._cuts.hurry_over_ms(began_at_ms) if self.view in self.proposals else self._cuts.half_due_ms

    def _watch_quorums(self) -> None:
        """Learn quorum certificates from the prevotes of any view."""
        terms = self._context.terms
        for view, votes in sorted(self.votes[Step.PREVOTE].items()):
            if len(votes) == self._counted.get(view, 0) or (self.qc is not None and self.qc.view >= view):
                continue
            self._counted[view] = len(votes)
            for body in sorted({_vote(signed).body for signed in votes.values()} - {NO_DIGEST}):
                chosen = self.votes_for(Step.PREVOTE, view, body)
                holders = sum(1 for signed in chosen.values() if _vote(signed).held)
                if len(chosen) >= terms.quorum and holders > terms.num_faults:
                    self.qc = make_qc(terms, body, view, chosen)
                    self._context.ballot.persist("qc", encode(self.qc))

    def _try_precommit(self) -> None:
        """Lock on a body that a quorum prevoted in the open view, and say so."""
        if self.qc is None or self.qc.view != self.view or self._voted(Step.PRECOMMIT):
            return
        known = self._bodies.known.get(self.qc.body)
        if known is None or not known.derived:
            return
        self.lock = Lock(self.view, known.hash)
        ballot = self._context.ballot
        # in this order: a torn write may not leave a lock that nothing this voter knows can serve or release
        ballot.persist("qc", encode(self.qc))
        self._keep(known)
        ballot.persist("lock", f"{self.view} {known.hash.hex()}".encode())
        self._cast(Step.PRECOMMIT, known.hash, held=False)

    def decided(self) -> Certificate | None:
        """The certificate, once q voters precommitted one body in one view."""
        terms = self._context.terms
        for view, votes in sorted(self.votes[Step.PRECOMMIT].items()):
            if len(votes) < terms.quorum:
                continue
            for body in sorted({_vote(signed).body for signed in votes.values()} - {NO_DIGEST}):
                chosen = self.votes_for(Step.PRECOMMIT, view, body)
                known = self._bodies.known.get(body)
                if len(chosen) >= terms.quorum and known is not None:
                    return make_certificate(terms, known.body, view, chosen, known.merge_lists)
        return None


def _vote(signed: Signed) -> Vote:
    return cast(Vote, signed.body)  # nothing else is among the votes
