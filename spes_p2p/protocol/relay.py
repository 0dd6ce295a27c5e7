"""Others' votes reach those whose line to the voter is broken: each asks a few voters for what it lacks.

`Seen` says which votes, proposals and view changes a voter has, two bytes each; whoever gets it answers with those
that differ. One broken line therefore decides nothing, and an equivocation comes to light, for little more than what
is really missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from spes_p2p.ids import PeerId
from spes_p2p.protocol.bodies import Bodies
from spes_p2p.protocol.codec import encode
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.messages import Proposal, ProposalMessage, Seen, SeenView, Signed, ViewChange
from spes_p2p.protocol.voting import Voting
from spes_p2p.protocol.wire import Step, Wire

FANOUT = 3
"""Voters asked per resend, each time others."""

MARK_BYTES = 2

_MAX_ANSWERS = 512
"""Messages sent for one `Seen`."""

_MAX_VIEWS = 64
"""Newest views that a `Seen` speaks of."""


class Relay:
    """What this voter has seen of the others, and what others lack of it."""

    def __init__(self, context: Context, voting: Voting, bodies: Bodies) -> None:
        self._context = context
        self._voting = voting
        self._bodies = bodies
        self._turn = 0
        self._answered_at_ms: dict[PeerId, int] = {}

    def ask(self) -> None:
        """Ask a few voters, once the open view has lasted longer than a resend or votes came before it began."""
        context, voting, terms = self._context, self._voting, self._context.terms
        if voting.view < 0:
            stirred = bool(voting.wishes or voting.proposals or any(voting.votes.values()))
        else:
            stirred = context.now_ms >= voting.began_at_ms[voting.view] + terms.config.protocol.resend_ms
        others = [peer for peer in terms.leaders if peer != context.me]
        if not stirred or not others:
            return
        seen = encode(self.seen())
        begin = terms.leaders.index(context.me) + self._turn
        for step in range(min(FANOUT, len(others))):
            context.emit(context.outbox.once(others[(begin + step) % len(others)], seen))
        self._turn += FANOUT

    def seen(self) -> Seen:
        """What this voter has."""
        terms, voting = self._context.terms, self._voting
        views = {*voting.proposals, *voting.votes[Step.PREVOTE], *voting.votes[Step.PRECOMMIT]}
        return Seen(
            terms.head.epoch,
            terms.ballot_round,
            tuple(_view_asked(voting.wishes.get(peer)) for peer in terms.voters),
            tuple(self._seen_view(view) for view in sorted(views)[-_MAX_VIEWS:]),
            terms.branch,
        )

    def _seen_view(self, view: int) -> SeenView:
        votes = self._voting.votes
        return SeenView(
            view,
            _mark(self._voting.proposals.get(view)),
            self._marks(votes[Step.PREVOTE].get(view, {})),
            self._marks(votes[Step.PRECOMMIT].get(view, {})),
        )

    def _marks(self, votes: Mapping[PeerId, Signed]) -> bytes:
        return b"".join(_mark(votes.get(peer)) for peer in self._context.terms.voters) if votes else b""

    def answer(self, sender: PeerId, seen: Seen) -> None:
        """Send a voter what it lacks, not more often than it should ask."""
        context = self._context
        last = self._answered_at_ms.get(sender)
        pause_ms = context.terms.config.protocol.resend_ms // 2
        if sender not in context.terms.voters or (last is not None and context.now_ms < last + pause_ms):
            return
        self._answered_at_ms[sender] = context.now_ms
        for number, message in enumerate(self.lacking(seen, sender)):
            if number == _MAX_ANSWERS:
                return
            context.emit(context.outbox.once(sender, encode(message)))

    def lacking(self, seen: Seen, peer: PeerId) -> Iterable[Wire]:
        """Everything that differs from what a peer has seen, but its own: view changes, then the newest views first."""
        voters, voting = self._context.terms.voters, self._voting
        asked = dict(zip(voters, seen.wishes, strict=False))
        for author, wish in sorted(voting.wishes.items()):
            if author != peer and _view_asked(wish) > asked.get(author, 0):
                yield wish
        theirs = {view.view: view for view in seen.views}
        views = {*voting.proposals, *voting.votes[Step.PREVOTE], *voting.votes[Step.PRECOMMIT]}
        for number in sorted(views, reverse=True):
            view = theirs.get(number, SeenView(number, b"", b"", b""))
            proposal = voting.proposals.get(number)
            if proposal is not None and proposal.peer != peer and _mark(proposal) != view.proposal:
                yield self._proposal(proposal)
            for step, marks in ((Step.PREVOTE, view.prevotes), (Step.PRECOMMIT, view.precommits)):
                votes = voting.votes[step].get(number, {})
                for place, author in enumerate(voters):
                    vote = votes.get(author)
                    known = marks[place * MARK_BYTES : (place + 1) * MARK_BYTES]
                    if vote is not None and author != peer and known != _mark(vote):
                        yield vote

    def _proposal(self, proposal: Signed) -> ProposalMessage:
        known = self._bodies.known[cast(Proposal, proposal.body).body]  # learned before the proposal is kept
        return ProposalMessage(proposal, known.body, known.merge_lists)


def _view_asked(wish: Signed | None) -> int:
    return wish.body.view if wish is not None and isinstance(wish.body, ViewChange) else 0


def _mark(signed: Signed | None) -> bytes:
    """Two bytes of the signature, which differs where what is signed does; zeros: nothing."""
    return bytes(MARK_BYTES) if signed is None else signed.signature[:MARK_BYTES]
