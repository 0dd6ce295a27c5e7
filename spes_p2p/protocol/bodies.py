"""Proposed bodies and the objective checks of a voter (docs/protocol.md, section 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import Body, base_of
from spes_p2p.protocol.codec import bits, body_hash
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.cuts import Cuts, KnownCut
from spes_p2p.protocol.effects import CheckRanking, FetchBlob
from spes_p2p.protocol.messages import Ref
from spes_p2p.protocol.parts import Parts
from spes_p2p.protocol.transition import Transition, make_body, merge_root
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.wire import NO_DIGEST, RefKind


@dataclass(slots=True)
class KnownBody:
    """A body and what this voter has found out about it."""

    body: Body
    hash: Digest
    merge_lists: bytes
    received_at_ms: int
    sources: list[PeerId] = field(default_factory=list)
    foreign: bool = False
    """It builds on another tip than this voter's, who cannot judge it."""
    derived: bool = False
    """It equals the pure function of (certificate, cut)."""
    supported: bool = False
    """Every part has its equal digests or is *kept*."""
    ranking_asked: bool = False
    ranked: bool = False
    """The merge lists are within the tolerance (or there is no merge)."""
    held: bool = False
    lacking: set[Digest] | None = None
    """Blobs that it names and that are not here; None: not looked at yet."""
    problem: str | None = None
    """Why it is objectively wrong."""
    fetched_at_ms: int | None = None


class Bodies:
    """The bodies of one round."""

    def __init__(self, context: Context, updates: Updates, cuts: Cuts, parts: Parts) -> None:
        self._context = context
        self._updates = updates
        self._cuts = cuts
        self._parts = parts
        self.known: dict[Digest, KnownBody] = {}

    def learn(self, body: Body, merge_lists: bytes, sources: Iterable[PeerId]) -> KnownBody:
        """Take a body that somebody proposed and begin its checks. Raises RemoteProtocolError."""
        identity = body_hash(body)
        known = self.known.get(identity)
        if known is None:
            if (merge_root(merge_lists) if body.merge_alpha else NO_DIGEST) != body.merge_root:
                raise RemoteProtocolError(None, "the merge lists do not match their root")
            if len(merge_lists) and not body.merge_alpha:
                raise RemoteProtocolError(None, "merge lists without a merge")
            known = KnownBody(body, identity, merge_lists, self._context.now_ms)
            known.foreign = base_of(body) != self._context.terms.head.hash
            self.known[identity] = known
            self._context.found(Ref(RefKind.BODY, identity, NO_DIGEST))
        for source in sources:
            if source not in known.sources:
                known.sources.append(source)
        self.examine(known)
        return known

    def cut_of(self, known: KnownBody) -> KnownCut | None:
        """The cut that a body is made from."""
        return self._cuts.known.get(known.body.cut)

    def examine(self, known: KnownBody) -> None:
        """Go on with the objective checks as far as what is held allows."""
        if known.problem is not None or known.foreign or (known.supported and known.held and known.ranked):
            return
        cut = self.cut_of(known)
        if cut is None:
            self._context.want(Ref(RefKind.CUT, known.body.cut, NO_DIGEST), known.sources)
            return
        self._cuts.resolve(cut)
        if cut.problem is not None:
            known.problem = f"its cut is wrong: {cut.problem}"
        if cut.transition is None or known.problem is not None:
            return
        if not known.derived:
            self._derive(known, cut.transition)
        if known.problem is None:
            self._support(known, cut.transition)
            self._hold(known, cut.transition)
        if known.problem is None and not known.ranked:
            self._rank(known, cut.transition)

    def _derive(self, known: KnownBody, transition: Transition) -> None:
        """Compare with the pure function of (certificate, cut)."""
        body = known.body
        parts = self._context.terms.aggregators
        try:
            kept = bits(body.kept, len(parts))
        except RemoteProtocolError as error:
            known.problem = error.reason
            return
        if len(body.parts) != len(parts):
            known.problem = "wrong number of parts"
            return
        if not transition.contributions and len(kept) != len(parts):
            known.problem = "parts that change without an update"
            return
        results = tuple(None if part in kept else body.parts[part] for part in range(len(parts)))
        if make_body(self._context.terms, transition, results, known.merge_lists) != body:
            known.problem = "not what follows from the certificate and the cut"
            return
        known.derived = True

    def kept(self, known: KnownBody) -> frozenset[int]:
        """Parts that keep their previous value."""
        return bits(known.body.kept, len(known.body.parts))

    def _support(self, known: KnownBody, transition: Transition) -> None:
        """Every part that changes needs `replicas` equal digests."""
        if known.supported:
            return
        kept = self.kept(known)
        known.supported = all(
            part in kept or self._parts.is_backed(transition.updates_hash, part, value)
            for part, value in enumerate(known.body.parts)
        )
        if not known.supported and self._context.is_voter:
            self._context.want(Ref(RefKind.DIGESTS, transition.updates_hash, NO_DIGEST), known.sources)
        elif known.supported:
            self._context.found(Ref(RefKind.DIGESTS, transition.updates_hash, NO_DIGEST))

    def _hold(self, known: KnownBody, transition: Transition) -> None:
        """Bring every part result and every expert blob that the body names."""
        context = self._context
        if known.held or not context.state_ready:
            return
        if known.lacking is None:
            known.lacking = set(self.new_blobs(known, transition))
        known.lacking = {blob for blob in known.lacking if blob not in context.held}  # few, and held are many
        known.held = not known.lacking
        resend_ms = context.terms.config.protocol.resend_ms
        if known.held or (known.fetched_at_ms is not None and context.now_ms < known.fetched_at_ms + resend_ms):
            return
        known.fetched_at_ms = context.now_ms
        for blob, (max_bytes, sources) in sorted(self.new_blobs(known, transition).items()):
            if blob in known.lacking:
                others = tuple(peer for peer in (*sources, *known.sources) if peer != context.me)
                context.emit(FetchBlob(blob=blob, max_bytes=max_bytes, sources=tuple(dict.fromkeys(others))))

    def new_blobs(self, known: KnownBody, transition: Transition) -> dict[Digest, tuple[int, tuple[PeerId, ...]]]:
        """Blobs that the body names and the previous state does not have: size limit and likely holders."""
        terms, sizes = self._context.terms, self._context.terms.head.run.sizes
        old_parts = set(terms.head.parts)
        found: dict[Digest, tuple[int, tuple[PeerId, ...]]] = {}
        for part, value in enumerate(known.body.parts):
            if value not in old_parts:
                supporters = self._parts.supporters(transition.updates_hash, part, value)
                found[value] = (sizes.part_result_bytes, supporters)
        old_blobs = {share.blob for row in terms.head.state.shards for share in row.blobs}
        for row in transition.state.shards:
            for share in row.blobs:
                if share.blob not in old_blobs:
                    found[share.blob] = (sizes.expert_blob_bytes, self._updates.sources(share.blob))
        return found

    def _rank(self, known: KnownBody, transition: Transition) -> None:
        """Check the merge lists against the experts, once they are all here."""
        if not known.body.merge_alpha:
            known.ranked = True
        elif known.held and not known.ranking_asked:
            known.ranking_asked = True
            shards = tuple(row.blobs for row in transition.state.shards)
            self._context.emit(CheckRanking(body=known.hash, shards=shards, merge_lists=known.merge_lists))

    def ranking_checked(self, identity: Digest, problem: str | None) -> None:
        """Result of `CheckRanking`."""
        known = self.known.get(identity)
        if known is not None:
            known.ranked = problem is None
            if problem is not None:
                known.problem = f"merge lists: {problem}"
