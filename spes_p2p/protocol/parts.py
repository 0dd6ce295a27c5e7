"""Averaging psi: who aggregates which part, and whose digests agree (docs/protocol.md, section 4, 4)."""

from __future__ import annotations

from collections import Counter
from typing import cast

from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.codec import check_signature
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.cuts import KnownCut
from spes_p2p.protocol.effects import Aggregate
from spes_p2p.protocol.evidence import conflicting
from spes_p2p.protocol.messages import PartDigest, Signed
from spes_p2p.protocol.transition import Transition
from spes_p2p.protocol.updates import Updates

_MAX_UPDATE_SETS = 64
"""Different sets of updates that one aggregator's digests may be over in a round: one per view is honest."""


class Parts:
    """Part results of one round, by the hash of the updates they are over."""

    def __init__(self, context: Context, updates: Updates) -> None:
        self._context = context
        self._updates = updates
        self._digests: dict[tuple[Digest, int], dict[PeerId, tuple[Signed, int]]] = {}
        """(updates, part) -> peer -> (signed digest, held since)."""
        self._sets: dict[PeerId, set[Digest]] = {}
        """Per aggregator, the sets of updates it has named."""
        self._backers: Counter[tuple[Digest, int, Digest]] = Counter()
        """(updates, part, value) -> aggregators that say so."""
        self._agreed: dict[tuple[Digest, int], set[Digest]] = {}
        self._begun: set[Digest] = set()
        """Sets of updates whose parts of the first `replicas` places are begun here."""
        self._asked: set[tuple[Digest, int]] = set()
        self._mine: dict[tuple[Digest, int], Digest] = {}
        self._rechecks: set[Digest] = set()
        """Sets of updates whose recheck has begun."""

    # --- as an aggregator --------------------------------------------------------------------------------------------

    def work(self, known: KnownCut, view: int) -> None:
        """Begin the parts of a cut that this peer should average by now."""
        context = self._context
        terms, transition = context.terms, known.transition
        if transition is None or not transition.contributions or not context.state_ready:
            return
        if context.me not in terms.eligible_set:
            return
        late = context.now_ms - known.received_at_ms >= terms.transfer_budget_ms // 2
        if transition.updates_hash in self._begun and not late:
            return
        self._begun.add(transition.updates_hash)
        reach = terms.replicas + (terms.num_faults + view + 1 if late else 0)
        for part, place in enumerate(terms.places(context.me)):
            if place >= reach or (transition.updates_hash, part) in self._asked:
                continue
            if place < terms.replicas or not self._has_result(transition.updates_hash, part):
                self._asked.add((transition.updates_hash, part))
                self._aggregate(transition, part, recheck=False)

    def _aggregate(self, transition: Transition, part: int, *, recheck: bool) -> None:
        blobs = [contribution.pieces[part].blob for contribution in transition.contributions]
        self._context.emit(
            Aggregate(
                updates=transition.updates_hash,
                part=part,
                previous=self._context.terms.head.parts[part],
                contributions=transition.contributions,
                sources={blob: self._updates.sources(blob) for blob in blobs},
                recheck=recheck,
            )
        )

    def aggregated(self, updates: Digest, part: int, value: Digest) -> None:
        """A part was averaged here and is stored: say so to all voters."""
        context = self._context
        head = context.terms.head
        self._mine[updates, part] = value
        context.held.add(value)
        body = PartDigest(head.run.run_id, head.epoch, context.terms.round, part, updates, value)
        signed = context.sign_once(f"part/{updates.hex()}/{part}", body)
        self.add(signed)
        context.send(context.terms.voters, signed)

    # --- as a voter --------------------------------------------------------------------------------------------------

    def add(self, signed: Signed) -> None:
        """An aggregator's digest. Raises RemoteProtocolError."""
        body = signed.body
        if not isinstance(body, PartDigest) or body.part >= len(self._context.terms.aggregators):
            raise RemoteProtocolError(signed.peer, "malformed part digest")
        if signed.peer not in self._context.terms.eligible_set:
            raise RemoteProtocolError(signed.peer, "a part digest of a peer that does not aggregate")
        before = self._digests.get((body.updates, body.part), {}).get(signed.peer)
        if before is not None:
            if conflicting(before[0], signed):
                check_signature(signed, self._context.verifier)
                self._updates.accuse(before[0], signed)
            return
        sets = self._sets.setdefault(signed.peer, set())
        if body.updates not in sets and len(sets) >= _MAX_UPDATE_SETS:
            return
        check_signature(signed, self._context.verifier)
        sets.add(body.updates)
        key, value = (body.updates, body.part), body.digest
        self._digests.setdefault(key, {})[signed.peer] = (signed, self._context.now_ms)
        self._backers[*key, value] += 1
        if self.is_backed(*key, value):
            self._agreed.setdefault(key, set()).add(value)

    def supporters(self, updates: Digest, part: int, value: Digest) -> tuple[PeerId, ...]:
        """Aggregators that say this digest."""
        votes = self._digests.get((updates, part), {})
        return tuple(sorted(peer for peer, (signed, _) in votes.items() if _value(signed) == value))

    def result(self, updates: Digest, part: int) -> Digest | None:
        """The digest that `replicas` aggregators agree on; of several the one that is held, then the more agreed on.

        There are several only where liars agree too. What they made up they can serve to nobody whom they want to stop.
        """
        held, backers = self._context.held, self._backers
        enough = self._agreed.get((updates, part), ())
        return min(enough, key=lambda value: (value not in held, -backers[updates, part, value], value), default=None)

    def is_backed(self, updates: Digest, part: int, value: Digest) -> bool:
        """Whether `replicas` aggregators say this digest."""
        return self._backers[updates, part, value] >= self._context.terms.replicas

    def _has_result(self, updates: Digest, part: int) -> bool:
        """Whether this peer holds what `replicas` aggregators agree on: signing a digest does not make it available."""
        value = self.result(updates, part)
        return value is not None and value in self._context.held

    def agreed_before(self, updates: Digest, part: int, before_ms: int) -> bool:
        """Whether `replicas` equal digests were held before that moment."""
        votes = self._digests.get((updates, part), {})
        early = [_value(signed) for signed, held_at_ms in votes.values() if held_at_ms <= before_ms]
        return any(early.count(value) >= self._context.terms.replicas for value in set(early))

    def all_signed(self, updates: Digest) -> list[Signed]:
        """Everything known about these updates' parts, for a peer that asks."""
        return [
            signed
            for (known, _), votes in sorted(self._digests.items())
            if known == updates
            for _, (signed, _) in sorted(votes.items())
        ]

    def everything(self) -> list[Signed]:
        """All digests of this round, for a voter that came back."""
        return [signed for _, votes in sorted(self._digests.items()) for _, (signed, _) in sorted(votes.items())]

    # --- the private recheck -----------------------------------------------------------------------------------------

    def recheck(self, transition: Transition, kept: frozenset[int], digests: tuple[Digest, ...]) -> bool | None:
        """Whether the part drawn from this peer's private seed has the digest that is proposed; None: not known yet."""
        context = self._context
        drawn = [part for part in range(len(digests)) if part not in kept]
        if not drawn or not transition.contributions:
            return True
        seed = digest("recheck", context.private_seed, context.terms.seed)
        part = drawn[int.from_bytes(seed[:8], "little") % len(drawn)]
        mine = self._mine.get((transition.updates_hash, part))
        if mine is not None:
            return mine == digests[part]
        if transition.updates_hash not in self._rechecks:
            if not context.state_ready:
                return None
            self._rechecks.add(transition.updates_hash)
            if (transition.updates_hash, part) not in self._asked:
                self._aggregate(transition, part, recheck=True)
        return None

    def rechecked(self, updates: Digest, part: int, value: Digest) -> None:
        """The recheck's own result."""
        self._mine[updates, part] = value


def _value(signed: Signed) -> Digest:
    return cast(PartDigest, signed.body).digest  # nothing else is among the digests
