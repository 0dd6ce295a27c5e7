"""What each mutant of `mutants.py` puts in place of the right code: one rule is wrong in each.

A function returns its patches: (module or class, name, what stands there instead).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping

import msgspec

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Verifier
from spes_p2p.protocol import certificate, cuts, election, leases, recovery, roster, statements, transition, voting
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.bodies import Bodies, KnownBody
from spes_p2p.protocol.body import Certificate, Cut
from spes_p2p.protocol.branches import Branches
from spes_p2p.protocol.context import Context, Promises
from spes_p2p.protocol.cuts import Cuts
from spes_p2p.protocol.effects import Effect
from spes_p2p.protocol.head import Head, Terms, may_go_on
from spes_p2p.protocol.messages import (
    AckMark,
    CutAnnouncement,
    Manifest,
    Proposal,
    QuorumCertificate,
    Receipt,
    ViewChange,
    Vote,
)
from spes_p2p.protocol.params import faults, quorum
from spes_p2p.protocol.parts import Parts
from spes_p2p.protocol.receipts import Tally
from spes_p2p.protocol.relay import Relay
from spes_p2p.protocol.round import RoundMachine
from spes_p2p.protocol.stash import Stash
from spes_p2p.protocol.state import RosterRow
from spes_p2p.protocol.statements import Item
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.voting import Voting
from spes_p2p.protocol.wire import ItemKind, Step
from spes_p2p.training.arrays import Tensors
from spes_p2p.training.start import StartReader

Patch = tuple[object, str, object]
"""(module or class, name, what stands there instead)."""


# --- votes and locks -------------------------------------------------------------------------------------------------


def small_quorum() -> list[Patch]:
    """One vote less than a quorum decides."""

    def fewer(num_voters: int) -> int:
        return max(1, quorum(num_voters) - 1)

    return [(Terms, "quorum", property(lambda self: fewer(len(self.voters)))), (certificate, "quorum", fewer)]


def no_lock() -> list[Patch]:
    """Who precommitted a body prevotes another one in the next view."""
    right = Voting._judge

    def judge(self: Voting, proposal: Proposal, known: KnownBody) -> str | None:
        lock, self.lock = self.lock, None
        try:
            return right(self, proposal, known)
        finally:
            self.lock = lock

    return [(Voting, "_judge", judge)]


def eternal_lock() -> list[Patch]:
    """No quorum certificate releases a lock."""
    right = Voting._judge

    def judge(self: Voting, proposal: Proposal, known: KnownBody) -> str | None:
        if self.lock is not None and self.lock.body != known.hash:
            return "locked for ever"
        return right(self, proposal, known)

    return [(Voting, "_judge", judge)]


def local_checks_of_a_qc() -> list[Patch]:
    """A body with a quorum certificate is judged by local knowledge too."""
    right = Voting._judge

    def judge(self: Voting, proposal: Proposal, known: KnownBody) -> str | None:
        verdict = right(self, proposal, known)
        cut = self._bodies.cut_of(known)
        if verdict != "" or proposal.qc is None or cut is None or cut.transition is None:
            return verdict
        return self._judge_locally(known, cut, cut.transition)

    return [(Voting, "_judge", judge)]


def views_add_up() -> list[Patch]:
    """Votes of different views count together."""
    right = Voting.decided

    def decided(self: Voting) -> Certificate | None:
        by_view = self.votes[Step.PRECOMMIT]
        together = {peer: vote for votes in by_view.values() for peer, vote in votes.items()}
        self.votes[Step.PRECOMMIT] = {max(by_view, default=0): together}
        try:
            return right(self)
        finally:
            self.votes[Step.PRECOMMIT] = by_view

    return [(Voting, "decided", decided)]


def early_views() -> list[Patch]:
    """A view is entered when f + 1 have asked for it."""
    right = Voting._follow_views

    def follow_views(self: Voting) -> None:
        right(self)
        terms, asked = self._context.terms, self._asked_views()
        if len(asked) > terms.num_faults and asked[terms.num_faults] > self.view:
            self.begin(asked[terms.num_faults])

    return [(Voting, "_follow_views", follow_views)]


def held_unseen() -> list[Patch]:
    """A voter says that it holds what it has not seen."""

    def hold(self: Bodies, known: KnownBody, _: transition.Transition) -> None:
        known.held = True

    return [(Bodies, "_hold", hold)]


def liars_believed() -> list[Patch]:
    """A voter takes the word of f others that they hold a body's blobs."""
    right = Voting.held_votes
    return [(Voting, "held_votes", lambda self, view, body: right(self, view, body) + 1)]


def qc_without_holders() -> list[Patch]:
    """A quorum certificate needs nobody that holds the blobs."""
    right = certificate.verify_qc

    def verify(terms: Terms, qc: QuorumCertificate, verifier: Verifier) -> None:
        try:
            right(terms, qc, verifier)
        except RemoteProtocolError as error:
            if "without enough holders" not in error.reason:
                raise

    return [(certificate, "verify_qc", verify), (voting, "verify_qc", verify)]


def no_forwarding() -> list[Patch]:
    """Others' votes are not passed on."""
    return [(Relay, "ask", lambda self: None)]


# --- promises --------------------------------------------------------------------------------------------------------


def no_journal() -> list[Patch]:
    """What is signed is not journalled."""

    def persist(self: Promises, slot: str, data: bytes) -> None:
        self.context.journal[self.prefix + slot] = data

    return [(Promises, "persist", persist)]


def journal_after_send() -> list[Patch]:
    """What is signed is journalled after it has left."""
    right = RoundMachine._flush

    def flush(self: RoundMachine) -> list[Effect]:
        found = right(self)
        return [e for e in found if not isinstance(e, fx.Persist)] + [e for e in found if isinstance(e, fx.Persist)]

    return [(RoundMachine, "_flush", flush)]


def second_manifest_acked() -> list[Patch]:
    """After a restart an acker acknowledges another manifest of a slot."""
    return [(Updates, "_promise_slot", lambda self, held, manifest: True)]


# --- cuts and updates ------------------------------------------------------------------------------------------------


def receipt_of_one_ack() -> list[Patch]:
    """One ack of every piece makes a receipt."""
    return [(Tally, "is_enough", property(lambda self: all(self._counts)))]


def update_without_receipt() -> list[Patch]:
    """An update without a receipt enters a cut."""
    right = statements.check_cut

    def check(terms: Terms, cut: Cut, items: tuple[Item, ...], receipts: Mapping[Digest, Receipt]) -> None:
        try:
            right(terms, cut, items, receipts)
        except RemoteProtocolError as error:
            if "has no receipt" not in error.reason:
                raise

    return [(cuts, "check_cut", check)]


def acks_of_all_members() -> list[Patch]:
    """Acks of peers that are not eligible count."""
    right = Tally.__init__

    def init(self: Tally, terms: Terms, manifest: Manifest, acks: Iterable[AckMark] = ()) -> None:
        right(self, terms, manifest)
        self._eligible = frozenset(terms.members)
        for mark in acks:
            self.add(mark)

    return [(Tally, "__init__", init)]


def stale_fencing_token() -> list[Patch]:
    """An update that was trained from another certificate is accepted."""
    right = statements._check_manifest

    def check(terms: Terms, peer: PeerId, manifest: Manifest) -> None:
        token = dict(terms.head.recent).get(manifest.round - 1, manifest.prev)
        right(terms, peer, msgspec.structs.replace(manifest, prev=token))

    return [(statements, "_check_manifest", check)]


def inclusion_by_hash() -> list[Patch]:
    """The cut must name the very statements that a voter holds."""

    def missing(self: Cuts, items: Iterable[Item], before_ms: int) -> list[str]:
        named = {item.entry.statement for item in items}
        early = (held for held in self._updates.slots.values() if held.held_at_ms <= before_ms)
        return [held.signed.body.tag for held in early if held.hash not in named]

    return [(Cuts, "missing", missing)]


def omission_allowed() -> list[Patch]:
    """A leader may leave out what it does not like."""
    return [(Cuts, "missing", lambda self, items, before_ms: [])]


def hurry_allowed() -> list[Patch]:
    """A leader need not wait for the updates that are under way."""
    return [(Cuts, "left_out", lambda self, items, before_ms: [])]


def kept_on_trust() -> list[Patch]:
    """A part may be kept although its digests agreed in time."""
    return [(Parts, "agreed_before", lambda self, updates, part, before_ms: False)]


def one_digest() -> list[Patch]:
    """One aggregator's word is enough for a part."""

    def is_backed(self: Parts, updates: Digest, part: int, value: Digest) -> bool:
        return bool(self.supporters(updates, part, value))

    return [(Parts, "is_backed", is_backed)]


def no_recheck() -> list[Patch]:
    """Voters do not recompute a part."""
    return [(Parts, "recheck", lambda self, known, kept, digests: True)]


# --- state -----------------------------------------------------------------------------------------------------------


def lease_by_arrival() -> list[Patch]:
    """A vacant shard goes to the claim that came first."""
    resolve, order = Cuts.resolve, election.claim_order
    arrived: list[PeerId] = []

    def resolving(self: Cuts, known: cuts.KnownCut) -> None:
        arrived[:] = [peer for kind, peer, _ in self._updates.slots if kind in (ItemKind.CLAIM, ItemKind.JOIN)]
        resolve(self, known)

    def by_arrival(seed: Digest, shard: int, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        right = order(seed, shard, peers)
        return tuple(sorted(right, key=lambda peer: arrived.index(peer) if peer in arrived else len(arrived)))

    return [(Cuts, "resolve", resolving), (election, "claim_order", by_arrival)]


def anybody_delivers() -> list[Patch]:
    """An expert blob enters whoever owns the shard."""
    return [(transition, "_expert_refusal", lambda lease, row, peer, manifest, piece: None)]


def evidence_ignored() -> list[Patch]:
    """Who signed two values for a slot stays in the roster."""
    right = roster.next_roster

    def ignoring(terms: Terms, change: roster.RosterChange) -> tuple[RosterRow, ...]:
        return right(terms, dataclasses.replace(change, evicted=frozenset()))

    return [(transition, "next_roster", ignoring)]


def liars_return() -> list[Patch]:
    """Nobody accuses a peer again that was evicted and asks to join."""
    return [(Updates, "_accuse_joiner", lambda self, peer: None)]


def growth_unlimited() -> list[Patch]:
    """All who qualify vote at once."""
    return [(roster, "_most_new_voters", lambda terms, num_staying: 1_000_000)]


def one_silent_round() -> list[Patch]:
    """One cut without an item ends a membership."""
    return [(roster, "SILENT_ROUNDS", 1)]


def merged_for_ever() -> list[Patch]:
    """Merged values outlive the certificate of their merge."""
    right = StartReader.start
    merged: dict[tuple[Digest, ...], Tensors] = {}

    def start(self: StartReader, shard: int) -> Tensors:
        blobs = tuple(blob for blob, _ in self._spec.shards[shard])
        if self._spec.merge_alpha:
            merged[blobs] = right(self, shard)
        return merged.get(blobs) or right(self, shard)

    return [(StartReader, "start", start)]


# --- tentative branches ----------------------------------------------------------------------------------------------


def _everywhere(name: str, right: object, instead: object) -> list[Patch]:
    """A patch for each module of the core that has imported a name."""
    core = [module for key, module in sorted(sys.modules.items()) if key.startswith("spes_p2p.protocol")]
    return [(module, name, instead) for module in core if vars(module).get(name) is right]


def tentative_votes_count() -> list[Patch]:
    """A vote in a tentative attempt counts in the final voting of its height."""
    right = Context.in_ballot

    def in_ballot(self: Context, body: CutAnnouncement | Proposal | Vote | ViewChange) -> bool:
        return right(self, msgspec.structs.replace(body, branch=self.terms.branch))

    return [(Context, "in_ballot", in_ballot)]


def detour_unlocks() -> list[Patch]:
    """Who goes on with a tentative attempt forgets what it has locked in the final voting."""
    right, restoring = RoundMachine._close, Voting.restore

    def close(self: RoundMachine) -> Stash:
        stash = right(self)
        self._height.log, self._height.pinned = [], None
        return stash

    def restore(self: Voting) -> None:
        restoring(self)
        self.lock = self.qc = None

    return [(RoundMachine, "_close", close), (Voting, "restore", restore)]


def tentative_leave() -> list[Patch]:
    """A tentative cut may have items that change the roster."""
    return _everywhere("TENTATIVE_KINDS", statements.TENTATIVE_KINDS, frozenset(ItemKind))


def fork_by_arrival() -> list[Patch]:
    """Of two branches the one that came first is built on."""

    def best(self: Branches) -> Head:
        tip = self.trunk
        while found := [head for head in self.heads.values() if head.base is not None and head.base.hash == tip.hash]:
            tip = found[0]
        return tip

    return [(Branches, "best", best)]


def tentative_without_end() -> list[Patch]:
    """Half of the voters go on for as long as they like."""

    def go_on(head: Head, side: tuple[PeerId, ...]) -> bool:
        voters = head.last_final.state.voters
        return faults(len(voters)) < len(side) < quorum(len(voters)) and set(side) <= set(voters)

    return _everywhere("may_go_on", may_go_on, go_on)


def recovery_by_anybody() -> list[Patch]:
    """A new epoch needs no signature of the recovery key."""

    def verify(head: Head, certificate: Certificate, verifier: Verifier) -> Head:
        return recovery.recovered(head, certificate)

    return _everywhere("verify_recovery", recovery.verify_recovery, verify)


def final_left() -> list[Patch]:
    """The branches of the height before are built on again after its final certificate."""
    right = RoundMachine._adopt

    def adopt(self: RoundMachine, certificate: Certificate, head: Head, terms: Terms) -> None:
        before = self._height.branches
        right(self, certificate, head, terms)
        if head.is_final:
            self._height.branches.heads.update(before.heads)
            self._height.branches.certificates.update(before.certificates)

    return [(RoundMachine, "_adopt", adopt)]


def leases_of_a_branch_stay() -> list[Patch]:
    """What tentative certificates did to leases outlives the next final one."""
    return [(leases, "_leases_before", lambda terms: terms.head.state.leases)]
