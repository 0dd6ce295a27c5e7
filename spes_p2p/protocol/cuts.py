"""Cuts: when view 0 begins, what the leader names, what others must find in it (docs/protocol.md, sections 4, 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.body import Cut, CutItem
from spes_p2p.protocol.codec import check_signature, cut_hash
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.evidence import conflicting
from spes_p2p.protocol.history import Held
from spes_p2p.protocol.messages import CutAnnouncement, CutMessage, Ref, Signed
from spes_p2p.protocol.params import MAX_JOINERS, MAX_VIEWS_AHEAD
from spes_p2p.protocol.statements import TENTATIVE_KINDS, Item, Slot, check_cut, item_sort_key
from spes_p2p.protocol.transition import Transition
from spes_p2p.protocol.updates import Updates
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, RefKind


@dataclass(slots=True)
class KnownCut:
    """A cut, and what became of it here."""

    cut: Cut
    hash: Digest
    received_at_ms: int
    sources: list[PeerId]
    items: tuple[Item, ...] | None = None
    """Once every statement and receipt it names is held and the whole is valid."""
    transition: Transition | None = None
    problem: str | None = None
    """Why it is objectively wrong."""


class Cuts:
    """The cuts of one round."""

    def __init__(self, context: Context, updates: Updates) -> None:
        self._context = context
        self._updates = updates
        self.known: dict[Digest, KnownCut] = {}
        self.announced: dict[int, Signed] = {}
        """Per view, the leader's announcement."""
        self.announced_at_ms: dict[int, int] = {}
        self.view = -1
        """The open view, as `voting` sees it: how far ahead announcements are kept."""

    # --- timing ------------------------------------------------------------------------------------------------------

    def all_live_in(self) -> bool:
        """Whether a manifest or `Alive{no more}` of every live member is held; never if nobody is live, nor in a
        tentative attempt without any update.

        Otherwise rounds of a run whose members have all stopped, or of a side whose members are all leaving, which only
        a final certificate lets them, would follow each other without a pause.
        """
        terms = self._context.terms
        if terms.tentative and terms.round > 1 and not self._updates.manifests():
            return False
        return bool(terms.live) and self._updates.live_are_in()

    def view0_due_ms(self, training_ended_at_ms: int | None) -> int | None:
        """When view 0 begins here if not all live members come in before; None: not known yet."""
        context = self._context
        protocol = context.terms.config.protocol
        half_at = self._updates.half_at_ms
        if training_ended_at_ms is None:
            # It could not train: ended at round_max, or the grace after half of the manifests.
            ended = context.opened_at_ms + protocol.round_max_ms
            return ended if half_at is None else min(ended, half_at + protocol.train_grace_ms)
        due = training_ended_at_ms + protocol.train_grace_ms
        if half_at is not None:
            due = min(due, half_at + protocol.train_grace_ms)
        return max(due, training_ended_at_ms)

    @property
    def half_due_ms(self) -> int | None:
        """The grace after manifests of half of the members were held; None: they are not."""
        half_at_ms = self._updates.half_at_ms
        return None if half_at_ms is None else half_at_ms + self._context.terms.config.protocol.train_grace_ms

    def leader_may_cut(self, first_view_began_at_ms: int) -> bool:
        """Whether the leader of the round's first view cuts now."""
        context = self._context
        age = context.now_ms - context.opened_at_ms
        if age < context.terms.config.protocol.round_min and not self.all_live_in():
            return False
        if context.now_ms >= first_view_began_at_ms + context.terms.transfer_budget_ms:
            return True
        half_due_ms = self.half_due_ms
        if not self._updates.live_are_in() and (half_due_ms is None or context.now_ms < half_due_ms):
            return False  # it trained faster than the others: without them there is hardly anything to average
        return all(held.receipt is not None for held in self._updates.manifests())

    # --- making and taking -------------------------------------------------------------------------------------------

    def make(self) -> Cut:
        """A cut of everything that is held and valid in this round."""
        terms = self._context.terms
        entries: list[CutItem] = []
        covered: set[PeerId] = set()
        for held in self._updates.slots.values():
            if self.includable(held):
                entries.append(CutItem(ItemKind.UPDATE, held.signed.peer, held.hash, held.receipt_hash))
                covered.add(held.signed.peer)
        for held in self._updates.manifests():
            if held.signed.peer not in covered:
                entries.append(CutItem(ItemKind.ALIVE, held.signed.peer, held.hash, NO_DIGEST))
                covered.add(held.signed.peer)
        for (kind, peer, _), held in self._updates.slots.items():
            if kind is ItemKind.UPDATE or (kind is ItemKind.ALIVE and peer in covered):
                continue
            if terms.tentative and kind not in TENTATIVE_KINDS:
                continue
            if kind is ItemKind.EVIDENCE and not self._updates.concerns(peer):
                continue
            entries.append(CutItem(kind, held.signed.peer, held.hash, NO_DIGEST))
        items = tuple(sorted(entries, key=item_sort_key))
        return Cut(terms.head.run.run_id, terms.head.epoch, terms.round, items)

    def includable(self, held: Held) -> bool:
        """Whether an update that is held may be an item of this round's cut."""
        row = self._context.terms.head.state.row(held.signed.peer)
        manifest = held.manifest
        return manifest is not None and held.receipt is not None and row is not None and manifest.round > row.base_round

    def announce(self, view: int, cut: Cut) -> CutMessage:
        """Sign a cut as leader of a view; what was signed before a restart is signed again."""
        context = self._context
        head = context.terms.head
        body = CutAnnouncement(
            head.run.run_id, head.epoch, context.terms.ballot_round, view, cut_hash(cut), context.terms.branch
        )
        return CutMessage(context.ballot.sign_once(f"cut/{view}", body), cut)

    def newest_complete(self) -> Cut | None:
        """The newest cut known, if it names every item that is held."""
        for known in sorted(self.known.values(), key=lambda known: (-known.received_at_ms, known.hash)):
            if known.items is not None and not self.missing(known.items, before_ms=self._context.now_ms):
                return known.cut
        return None

    def add(self, message: CutMessage, sender: PeerId) -> KnownCut | None:
        """A cut with its leader's signature; None if it is not kept. Raises RemoteProtocolError."""
        context, signed = self._context, message.announcement
        body = signed.body
        if not isinstance(body, CutAnnouncement) or body.cut != cut_hash(message.cut):
            raise RemoteProtocolError(sender, "a cut that its announcement does not name")
        if not context.in_ballot(body):
            raise RemoteProtocolError(signed.peer, "a cut announced for another round")
        if signed.peer != context.terms.leader(body.view):
            raise RemoteProtocolError(signed.peer, f"a cut by a peer that does not lead view {body.view}")
        if body.view > self.view + MAX_VIEWS_AHEAD:
            return None
        before = self.announced.get(body.view)
        if before != signed:
            check_signature(signed, context.verifier)
            if before is not None and conflicting(before, signed):
                self._updates.accuse(before, signed)
                if not context.is_wanted(Ref(RefKind.CUT, body.cut, NO_DIGEST)):
                    return None  # a second cut of one view counts only if a vote or a quorum certificate names it
            self.announced.setdefault(body.view, signed)
            self.announced_at_ms.setdefault(body.view, context.now_ms)
        if message.cut.round != context.terms.round:
            return None  # for another tip: this voter cannot judge it
        return self.learn(message.cut, (signed.peer, sender))

    def learn(self, cut: Cut, sources: Iterable[PeerId]) -> KnownCut:
        """Take a cut whoever names it, and ask for what it names."""
        identity = cut_hash(cut)
        known = self.known.get(identity)
        if known is None:
            known = KnownCut(cut, identity, self._context.now_ms, [])
            self.known[identity] = known
            self._context.found(Ref(RefKind.CUT, identity, NO_DIGEST))
        for source in sources:
            if source not in known.sources:
                known.sources.append(source)
        self.resolve(known)
        return known

    def signed_or_bare(self, identity: Digest) -> CutMessage | Cut | None:
        """A cut that is known, with a leader's announcement of it if there is one: two of one view are evidence."""
        known = self.known.get(identity)
        if known is None:
            return None
        for _, signed in sorted(self.announced.items()):
            if isinstance(signed.body, CutAnnouncement) and signed.body.cut == identity:
                return CutMessage(signed, known.cut)
        return known.cut

    def resolve(self, known: KnownCut) -> None:
        """Find the statements and receipts of a cut; check the whole once they are all here."""
        if known.items is not None or known.problem is not None:
            return
        context, updates = self._context, self._updates
        items, complete = [], True
        for entry in known.cut.items:
            held = updates.by_hash.get(entry.statement)
            if held is None:
                complete = False
                context.want(Ref(RefKind.STATEMENT, entry.statement, NO_DIGEST), known.sources)
                continue
            if entry.receipt != NO_DIGEST and entry.receipt not in updates.receipts:
                complete = False
                context.want(Ref(RefKind.RECEIPT, entry.receipt, entry.statement), known.sources)
            items.append(Item(entry=entry, signed=held.signed))
        if not complete:
            return
        try:
            check_cut(context.terms, known.cut, tuple(items), updates.receipts)
            known.transition = context.derive.transition(context.terms, known.hash, tuple(items), context.verifier)
        except RemoteProtocolError as error:
            known.problem = error.reason
            return
        known.items = tuple(items)

    # --- the inclusion rule ------------------------------------------------------------------------------------------

    def first_view_from_ms(self, began_at_ms: int) -> int:
        """Since when the round's first view counts, which began here at that moment: for others it began the grace
        after half of the manifests at the latest, also while this peer still trained."""
        half_due_ms = self.half_due_ms
        return began_at_ms if half_due_ms is None else min(began_at_ms, half_due_ms)

    def under_way_by_ms(self, known: KnownCut, since_ms: int) -> int:
        """By when a manifest has to have been held here for a cut of the first view to wait for it.

        Before the grace after half of the manifests ends, a leader waits for all that are live, and then for none that
        it lacks. Its grace may end a little before this voter's: what came between, or was on its way to the leader
        still, is not its fault.
        """
        if self.half_due_ms is None:
            return since_ms
        ends_ms = self.half_due_ms - self._context.terms.config.protocol.view_timeout(0)
        return since_ms if known.received_at_ms < ends_ms else min(since_ms, ends_ms)

    def left_out(self, items: Iterable[Item], before_ms: int) -> list[Held]:
        """Updates of this base round whose manifests were held by then, and which a cut does not name as updates."""
        terms = self._context.terms
        named = {item.entry.peer for item in items if item.slot == (ItemKind.UPDATE, item.entry.peer, terms.round)}
        held_then = (held for held in self._updates.manifests() if held.held_at_ms <= before_ms)
        return [held for held in held_then if held.signed.peer not in named]

    def judge_hurry(self, cut: KnownCut, began_at_ms: int) -> str | None:
        """Whether a cut of the first view, which began here then, waited for the updates under way. None: wait
        and see; empty: it did; else what is wrong. Only after T does an honest leader leave one out, and by then it has
        heard of receipts that are here after half of T."""
        since_ms = self.first_view_from_ms(began_at_ms)
        half_ms = since_ms + self._context.terms.transfer_budget_ms // 2
        left_out = self.left_out(cut.items or (), self.under_way_by_ms(cut, since_ms))
        if any(held.receipt is not None and held.receipt_held_at_ms < half_ms for held in left_out):
            return "the cut did not wait for an update"
        return None if left_out and self._context.now_ms < self.hurry_over_ms(began_at_ms) else ""

    def hurry_over_ms(self, began_at_ms: int) -> int:
        """From when on a cut of the first view may leave out an update that has no receipt yet."""
        terms = self._context.terms
        since_ms = self.first_view_from_ms(began_at_ms)
        return since_ms + terms.transfer_budget_ms - terms.config.protocol.view_timeout(0) // 2

    def missing(self, items: Iterable[Item], before_ms: int) -> list[str]:
        """What this peer held complete before that moment and a cut leaves out; by slot, never by hash.

        A cut with as many joins as its leader may keep need not name more: every voter may keep others.
        """
        named: set[Slot] = set()
        present: set[PeerId] = set()
        members = self._context.terms.member_set
        for item in items:
            named.add(item.slot)
            if item.entry.kind is not ItemKind.EVIDENCE:
                present.add(item.entry.peer)
        found = []
        is_full = sum(kind is ItemKind.JOIN and peer not in members for kind, peer, _ in named) >= MAX_JOINERS
        for (kind, peer, base), held in self._updates.slots.items():
            if held.held_at_ms > before_ms or (kind is ItemKind.JOIN and is_full):
                continue
            if kind is ItemKind.UPDATE:
                if self.includable(held) and held.receipt_held_at_ms <= before_ms:
                    if (kind, peer, base) not in named:
                        found.append(f"update of round {base}")
                elif base == self._context.terms.round and peer not in present:
                    found.append("manifest")
            elif kind is ItemKind.ALIVE:
                if peer not in present:
                    found.append("alive")
            elif self._context.terms.tentative and kind not in TENTATIVE_KINDS:
                continue
            elif kind is ItemKind.EVIDENCE and not (peer in members or (ItemKind.JOIN, peer, 0) in named):
                continue  # it has nothing to prevent
            elif (kind, peer, 0) not in named:
                found.append(kind.name.lower())
        return found
