"""What the leader of a view does: name the cut, then propose a body (docs/protocol.md, section 4, 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.ids import Digest
from spes_p2p.protocol.bodies import Bodies, KnownBody
from spes_p2p.protocol.body import Cut
from spes_p2p.protocol.codec import decode, encode
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.cuts import Cuts, KnownCut
from spes_p2p.protocol.effects import FetchBlob, RankExperts
from spes_p2p.protocol.messages import CutAnnouncement, Proposal
from spes_p2p.protocol.parts import Parts
from spes_p2p.protocol.transition import Transition, make_body
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.voting import Voting


@dataclass(slots=True)
class _Ranking:
    asked: bool = False
    fetched_at_ms: int | None = None
    merge_lists: bytes | None = None


class Leader:
    """Acts only while this peer leads the open view."""

    def __init__(
        self, context: Context, updates: Updates, cuts: Cuts, parts: Parts, bodies: Bodies, voting: Voting
    ) -> None:
        self._context = context
        self._updates = updates
        self._cuts = cuts
        self._parts = parts
        self._bodies = bodies
        self._voting = voting
        self._rankings: dict[Digest, _Ranking] = {}
        self.num_cuts = 0

    def lead(self) -> None:
        """Name the cut, then propose, as soon as each is possible."""
        view, context = self._voting.view, self._context
        if view < 0 or not context.is_voter or context.terms.leader(view) != context.me:
            return
        if view not in self._cuts.announced:
            cut = self._choose_cut(view)
            if cut is None:
                return
            self._name(view, cut)
        if view not in self._voting.proposals:
            body = self._choose_body(view)
            if body is not None:
                self._voting.propose(body)

    def cut_of_view(self, view: int) -> KnownCut | None:
        """The cut that was announced for a view."""
        announcement = self._cuts.announced.get(view)
        if announcement is None or not isinstance(announcement.body, CutAnnouncement):
            return None
        return self._cuts.known.get(announcement.body.cut)

    def _choose_cut(self, view: int) -> Cut | None:
        """The cut of this view; None: not yet."""
        journalled = self._context.ballot.get(f"cut-body/{view}")
        if journalled is not None:
            before = decode(journalled)
            fits = isinstance(before, Cut) and before.round == self._context.terms.round
            return before if isinstance(before, Cut) and fits else None  # for another tip: the view is lost
        if self._voting.qc is not None:
            if self._voting.qc.view >= view:
                return None
            known = self._bodies.known.get(self._voting.qc.body)
            cut = self._bodies.cut_of(known) if known is not None else None
            return cut.cut if cut is not None else None
        if view == self._voting.first:
            ready = self._cuts.leader_may_cut(self._voting.began_at_ms[view])
            return self._cuts.make() if ready else None
        return self._cuts.newest_complete() or self._cuts.make()

    def _name(self, view: int, cut: Cut) -> None:
        context = self._context
        context.ballot.persist(f"cut-body/{view}", encode(cut))
        message = self._cuts.announce(view, cut)
        self.num_cuts += 1
        self._cuts.add(message, context.me)
        context.send(context.terms.eligible, message)

    def _choose_body(self, view: int) -> KnownBody | None:
        """The body of this view; None: not yet."""
        promised = self._context.ballot.promised(f"proposal/{view}")
        if promised is not None and isinstance(promised.body, Proposal):
            return self._bodies.known.get(promised.body.body)
        if self._voting.qc is not None:
            if self._voting.qc.view >= view:
                return None  # a quorum has voted in this view or a later one: this leader comes too late
            known = self._bodies.known.get(self._voting.qc.body)
            return known if known is not None and known.derived else None
        cut = self.cut_of_view(view)
        if cut is None or cut.transition is None:
            return None
        parts = self._results(view, cut.transition)
        if parts is None:
            return None
        merge_lists = b""
        if cut.transition.merge_alpha:
            ranking = self._rank(cut, cut.transition)
            if ranking is None:
                return None
            merge_lists = ranking
        body = make_body(self._context.terms, cut.transition, parts, merge_lists)
        return self._bodies.learn(body, merge_lists, [self._context.me])

    def _results(self, view: int, transition: Transition) -> tuple[Digest | None, ...] | None:
        """Per part its agreed result, or None where it is kept; None as a whole: wait for more digests, at most T."""
        parts = range(len(self._context.terms.aggregators))
        if not transition.contributions:
            return tuple(None for _ in parts)
        results = tuple(self._parts.result(transition.updates_hash, part) for part in parts)
        waited_ms = self._context.now_ms - self._cuts.announced_at_ms[view]
        if any(result is None for result in results) and waited_ms < self._context.terms.transfer_budget_ms:
            return None
        return results

    def _rank(self, cut: KnownCut, transition: Transition) -> bytes | None:
        """The merge lists over the experts that the cut makes, once all of them are here."""
        context = self._context
        ranking = self._rankings.setdefault(cut.hash, _Ranking())
        if ranking.merge_lists is not None or ranking.asked or not context.state_ready:
            return ranking.merge_lists
        old = {share.blob for row in context.terms.head.state.shards for share in row.blobs}
        new = {share.blob for row in transition.state.shards for share in row.blobs} - old
        lacking = sorted(blob for blob in new if blob not in context.held)
        if not lacking:
            ranking.asked = True
            context.emit(RankExperts(cut=cut.hash, shards=tuple(row.blobs for row in transition.state.shards)))
            return None
        resend_ms = context.terms.config.protocol.resend_ms
        if ranking.fetched_at_ms is None or context.now_ms >= ranking.fetched_at_ms + resend_ms:
            ranking.fetched_at_ms = context.now_ms
            limit = context.terms.head.run.sizes.expert_blob_bytes
            for blob in lacking:
                context.emit(FetchBlob(blob=blob, max_bytes=limit, sources=self._updates.sources(blob)))
        return None

    def ranked(self, cut: Digest, merge_lists: bytes) -> None:
        """Result of `RankExperts`."""
        self._rankings.setdefault(cut, _Ranking()).merge_lists = merge_lists
