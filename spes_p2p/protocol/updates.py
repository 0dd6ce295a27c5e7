"""Statements of the round, and the way of an update: manifest, acks, receipt (docs/protocol.md, section 4, 2 and 3)."""

from __future__ import annotations

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.protocol.codec import bitmap, bits, encode, receipt_hash, sign, statement_hash
from spes_p2p.protocol.context import Context, acked_slot
from spes_p2p.protocol.effects import CheckPiece, FetchBlob
from spes_p2p.protocol.evidence import conflicting, named
from spes_p2p.protocol.history import Held, History
from spes_p2p.protocol.messages import (
    Ack,
    Alive,
    Claim,
    Evidence,
    Join,
    Manifest,
    Receipt,
    Ref,
    Refusal,
    Signed,
)
from spes_p2p.protocol.norms import Yardstick
from spes_p2p.protocol.params import MAX_JOINERS
from spes_p2p.protocol.receipts import Tally, check_mark, mark_of, num_acked
from spes_p2p.protocol.statements import Slot, check_statement, slot_of
from spes_p2p.protocol.wire import NO_DIGEST, ItemKind, PieceKind, RefKind, RefusalReason

_MAX_EARLY_RECEIPTS = 64
"""Receipts of one sender kept until their manifests come."""


class Updates:
    """All statements that may become items of this round's cut."""

    def __init__(self, context: Context, history: History) -> None:
        self._context = context
        self._history = history
        self.slots: dict[Slot, Held] = {}
        """What this peer would put into a cut."""
        self.by_hash: dict[Digest, Held] = {}
        """The same, and what others' cuts name in its place."""
        self.receipts: dict[Digest, Receipt] = {}
        self.spare_receipts: dict[Digest, Receipt] = {}
        """Receipts by manifest that hold in another ballot of the round only."""
        self._early_receipts: dict[tuple[Digest, PeerId], Receipt] = {}
        """(manifest, sender) -> a receipt whose manifest has not come."""
        self._current: dict[PeerId, Held] = {}
        """Updates of this base round, by author."""
        self._yardstick = Yardstick()
        """Norms of those."""
        self._in: set[PeerId] = set()
        self._awaited = set(context.terms.live)
        """Live members that are not in."""
        self._holders: dict[Digest, Held] = {}
        """Blob -> the update that has it."""
        self._num_strangers = 0
        self._looked: dict[Digest, tuple[object, ...]] = {}
        """Update -> what its pieces were last asked for by: while that is the same, there is nothing more to ask."""
        self._due_ms: int | None = None
        """When the next piece may come within reach; never too late, perhaps too early."""
        self._tallies: dict[Digest, Tally] = {}
        """Acks of this peer's own updates."""
        self.half_at_ms: int | None = None
        """Since when manifests of this round of at least half of the members are held, here or at honest voters."""
        self._told_half: set[PeerId] = set()

    # --- statements --------------------------------------------------------------------------------------------------

    def add(self, signed: Signed) -> bool:
        """Take a statement of any peer. Raises RemoteProtocolError. Returns whether it took its slot."""
        identity = statement_hash(signed)
        if identity in self.by_hash:
            return False
        self._check(signed, identity)
        return self._insert(Held(signed=signed, hash=identity, held_at_ms=self._context.now_ms))

    def _check(self, signed: Signed, identity: Digest) -> None:
        """Whether a statement may be kept. Raises RemoteProtocolError.

        Evidence against a stranger has its join to prevent, or somebody's cut names both: else it is as free as keys.
        """
        context = self._context
        check_statement(context.terms, signed, context.verifier)
        idle = isinstance(signed.body, Evidence) and not self.concerns(named(signed.body))
        if idle and not context.is_wanted(Ref(RefKind.STATEMENT, identity, NO_DIGEST)):
            raise RemoteProtocolError(signed.peer, "evidence against a peer that is no member and does not join")

    def concerns(self, accused: PeerId) -> bool:
        """Whether evidence against a peer changes anything: it is a member, or its join is held."""
        return accused in self._context.terms.member_set or (ItemKind.JOIN, accused, 0) in self.slots

    def _insert(self, held: Held) -> bool:
        """Enter a valid statement. One whose slot is taken, or a join too many, is kept only if somebody's cut names
        it: others keep other joins, and whoever lacks one of a cut can never vote for it."""
        context, signed = self._context, held.signed
        slot, ref = slot_of(signed), Ref(RefKind.STATEMENT, held.hash, NO_DIGEST)
        before = self.slots.get(slot)
        takes = before is None or self._replaces(before.signed, signed)
        takes = takes and held.hash not in context.terms.served
        is_newcomer = signed.peer not in context.terms.member_set and before is None
        takes = takes and not (is_newcomer and self._num_strangers >= MAX_JOINERS)
        if not takes and not context.is_wanted(ref):
            return False
        self._num_strangers += is_newcomer and takes
        if takes:
            held.held_at_ms = before.held_at_ms if before else held.held_at_ms
            self.slots[slot] = held
            if self._says_in(held):
                self._in.add(signed.peer)
                self._awaited.discard(signed.peer)
        self.by_hash[held.hash] = held
        if isinstance(signed.body, Evidence):
            self._history.keep_proof(signed.body)
        if isinstance(signed.body, Join) and takes:
            self._accuse_joiner(signed.peer)
        context.found(ref)
        if held.manifest is not None:
            self._holders.update((piece.blob, held) for piece in held.manifest.pieces)
            if takes:
                self._begin_update(held, held.manifest)
            self._take_early_receipts(held)
        return takes

    def _says_in(self, held: Held) -> bool:
        """Whether it is its author's update of this round, or says that there is none; in round 1 its claim."""
        body = held.signed.body
        if self._context.terms.round == 1:
            return isinstance(body, Claim)
        if isinstance(body, Manifest):
            return body.round == self._context.terms.round
        return isinstance(body, Alive) and not body.more

    def _take_early_receipts(self, held: Held) -> None:
        for key in [key for key in self._early_receipts if key[0] == held.hash]:
            try:
                self.add_receipt(self._early_receipts.pop(key))
            except RemoteProtocolError as error:
                self._context.notify(f"dropped a receipt that came before its manifest: {error.reason}", "warning")

    def _replaces(self, before: Signed, after: Signed) -> bool:
        """Whether a second statement takes the slot; two manifests for one slot are evidence."""
        if conflicting(before, after):
            self.accuse(before, after)
            return False
        if isinstance(before.body, Alive) and isinstance(after.body, Alive):
            return before.body.more and not after.body.more
        if isinstance(before.body, Evidence):
            return False
        return after.body.round > before.body.round

    def accuse(self, first: Signed, second: Signed) -> None:
        """Publish the proof that a peer signed two statements for one slot, once."""
        if first.peer != self._context.me and self._publish_proof(first.peer, encode(first), encode(second)):
            self._context.notify(f"a peer signed two {first.body.tag} statements for one slot", "warning")

    def accuse_again(self) -> None:
        """Publish what is remembered of peers that are members again."""
        for accused, proof in sorted(self._history.proofs.items()):
            self._publish_proof(accused, proof.first, proof.second)

    def _accuse_joiner(self, peer: PeerId) -> None:
        """Publish what is remembered of a peer that asks to join."""
        proof = self._history.proofs.get(peer)
        if proof is not None:
            self._publish_proof(peer, proof.first, proof.second)

    def _publish_proof(self, accused: PeerId, first: bytes, second: bytes) -> bool:
        """Whether the proof is news, and leaves."""
        context = self._context
        if not context.is_member or not self.concerns(accused):
            return False
        head = context.terms.head
        body = Evidence(head.run.run_id, head.epoch, context.terms.round, first, second)
        proof = context.sign_once(f"evidence/{accused.hex()}", body)
        is_news = self.add(proof)
        if is_news:
            context.send(context.terms.audience, proof)
        return is_news

    def _begin_update(self, held: Held, manifest: Manifest) -> None:
        context = self._context
        terms = context.terms
        if manifest.round == terms.round:
            self._current[held.signed.peer] = held
            self._yardstick = self._yardstick.extended([manifest])
        if self.half_at_ms is None and 2 * len(self._current) >= len(terms.members):
            self.half_at_ms = context.now_ms
            self._reach()  # some may have waited for this to be judged
        if held.signed.peer == context.me:
            self._try_receipt(held)
        else:
            self._ask_pieces(held)
            self._note_due(held)

    def told_half(self, voter: PeerId) -> None:
        """A voter says that half of the manifests are in; f + 1 of them are believed."""
        terms = self._context.terms
        if voter in terms.voter_set and self._context.me not in terms.audience:
            self._told_half.add(voter)
            if self.half_at_ms is None and len(self._told_half) > terms.num_faults:
                self.half_at_ms = self._context.now_ms

    def manifests(self) -> list[Held]:
        """Updates of this base round that are held."""
        return list(self._current.values())

    def is_in(self, peer: PeerId) -> bool:
        """Whether a manifest of this round, or `Alive{no more}`, of a peer is held; in round 1 its claim."""
        return peer in self._in

    def live_are_in(self) -> bool:
        """Whether all live members are in."""
        return not self._awaited

    # --- acknowledging others' updates -------------------------------------------------------------------------------

    def _ask_pieces(self, held: Held) -> None:
        """Fetch and check the pieces that this peer should acknowledge by now; spread expert blobs in any case."""
        context, manifest = self._context, held.manifest
        if manifest is None or held.receipt is not None or not context.is_member:
            return
        author = context.terms.head.state.row(held.signed.peer)
        if author is None or manifest.round <= author.base_round:
            return  # its slot is served: this may be another manifest than the one that was acknowledged for it
        patience = (context.now_ms - held.held_at_ms) // context.terms.config.protocol.resend_ms
        looked = patience, self._yardstick, self.half_at_ms is None
        if self._looked.get(held.hash) == looked or self._beyond_bound(held, manifest):
            return
        self._looked[held.hash] = looked
        acking = context.me in context.terms.eligible_set
        places = context.terms.places(context.me) if acking else ()
        reach = context.terms.replicas + 1 + patience
        for index, piece in enumerate(manifest.pieces):
            if index in (held.asked if acking else held.spread):
                continue
            if piece.kind is PieceKind.PSI and (not acking or places[piece.index] >= reach):
                continue
            row = self._history.rows.get(piece.base_row)
            unknown = piece.kind is PieceKind.EXPERT and row is None and manifest.round < context.terms.round
            if acking and unknown:
                continue  # a late update from before this process began: others can tell, this peer cannot
            if not acking:
                held.spread.add(index)
                context.emit(FetchBlob(blob=piece.blob, max_bytes=piece.size_bytes, sources=(held.signed.peer,)))
                continue
            held.asked.add(index)
            if piece.kind is PieceKind.EXPERT and (row is None or row.shard != piece.index):
                self.piece_checked(held.hash, index, RefusalReason.BASE_ROW)
                continue
            context.emit(
                CheckPiece(
                    manifest=held.hash,
                    author=held.signed.peer,
                    piece_index=index,
                    piece=piece,
                    base=row.blobs if row is not None and piece.kind is PieceKind.EXPERT else (),
                    sources=(held.signed.peer, *sorted(held.acks)),
                )
            )

    def _beyond_bound(self, held: Held, manifest: Manifest) -> bool:
        """Whether to let an update be: a stated norm is absurd, which gets a refusal, or cannot be judged yet."""
        context, protocol = self._context, self._context.terms.config.protocol
        most_steps = context.terms.head.inner_steps
        past = self._history.norms
        index = past.absurd_piece(manifest, bound=protocol.norm_bound, most_steps=most_steps)
        if past.psi and index is None:
            return False
        if self.half_at_ms is not None:
            index = self._yardstick.absurd_piece(manifest, bound=protocol.norm_bound, most_steps=most_steps)
        elif context.now_ms < held.held_at_ms + protocol.train_grace_ms:
            return True  # those of the others will tell
        if index is None:
            return False
        if index not in held.asked:
            held.asked.update(range(len(manifest.pieces)))
            if context.me in context.terms.eligible_set:
                self.piece_checked(held.hash, index, RefusalReason.NORM_BOUND)
        return True

    def piece_checked(self, identity: Digest, index: int, reason: RefusalReason | None) -> None:
        """A piece was stored and found fine, or refused; ack or tell the author."""
        held = self.by_hash.get(identity)
        if held is None or held.manifest is None:
            return
        context, manifest = self._context, held.manifest
        held.checks[index] = reason
        if reason is None:
            context.held.add(manifest.pieces[index].blob)
        elif reason is not RefusalReason.MISSING:
            body = Refusal(manifest.run, manifest.epoch, manifest.round, identity, index, reason)
            context.send([held.signed.peer], sign(context.signer, body))
            context.notify(f"refused a piece of an update: {reason.name.lower().replace('_', ' ')}", "warning")
        else:
            held.asked.discard(index)
            held.checks.pop(index)
            self._looked.pop(identity, None)
            self._note_due(held)
        self._send_ack(held)

    def _send_ack(self, held: Held) -> None:
        """Acknowledge once nothing that was asked for is outstanding."""
        context, manifest = self._context, held.manifest
        if manifest is None or held.asked - held.checks.keys():
            return
        good = frozenset(index for index, reason in held.checks.items() if reason is None)
        if good and good != held.acked and self._promise_slot(held, manifest):
            held.acked = good
            marks = bitmap(good, len(manifest.pieces))
            ack = Ack(manifest.run, manifest.epoch, manifest.round, held.hash, marks)
            context.send([held.signed.peer], sign(context.signer, ack))

    def _promise_slot(self, held: Held, manifest: Manifest) -> bool:
        """Journal which manifest of a slot this peer acknowledges; False if it was another, before a restart."""
        promises, slot = self._context.updates_on(manifest.prev), acked_slot(held.signed.peer)
        if (promises.get(slot) or held.hash) != held.hash:
            return False
        promises.persist(slot, held.hash)
        return True

    # --- receipts ----------------------------------------------------------------------------------------------------

    def add_ack(self, signed: Signed) -> None:
        """An ack of one of this peer's own updates."""
        ack = signed.body
        held = self.by_hash.get(ack.manifest) if isinstance(ack, Ack) else None
        if held is None or held.manifest is None or held.signed.peer != self._context.me:
            return
        if signed.peer not in self._context.terms.eligible_set:
            return  # it was eligible in the round of the update, perhaps
        mark = mark_of(signed)
        before = held.acks.get(signed.peer)
        if before == mark:
            return
        bits(mark.pieces, len(held.manifest.pieces))  # raises for what is no bitmap of them
        check_mark(mark, self._context.me, held.hash, held.manifest, self._context.verifier)
        if before is not None and num_acked(mark) <= num_acked(before):
            return  # it was overtaken, or its author has restarted: an acker never takes a piece back
        held.acks[signed.peer] = mark
        if held.hash in self._tallies:
            self._tallies[held.hash].add(mark)
        self._try_receipt(held)

    def _try_receipt(self, held: Held) -> None:
        """Assemble and broadcast the receipt of an own update once every piece has its acks."""
        context, manifest = self._context, held.manifest
        if manifest is None or held.receipt is not None:
            return
        tally = self._tallies.get(held.hash)
        if tally is None:
            tally = self._tallies[held.hash] = Tally(context.terms, manifest, held.acks.values())
        if tally.is_enough:
            receipt = Receipt(manifest.round, held.hash, tally.fewest())
            self.add_receipt(receipt)
            if receipt.acks:  # else it says nothing, and this peer alone needs it
                context.send(context.terms.audience, receipt)

    def add_receipt_or_keep(self, receipt: Receipt, sender: PeerId) -> None:
        """Like `add_receipt`; if its update is not here yet, ask for that and keep the receipt for then."""
        held = self.by_hash.get(receipt.manifest)
        if held is not None:
            try:
                self.add_receipt(receipt)
            except RemoteProtocolError:
                if not self._is_spare(receipt, held):
                    raise
                self.spare_receipts[receipt.manifest] = receipt
        elif sum(1 for _, other in self._early_receipts if other == sender) < _MAX_EARLY_RECEIPTS:
            self._early_receipts[receipt.manifest, sender] = receipt
            self._context.want(Ref(RefKind.STATEMENT, receipt.manifest, NO_DIGEST), [sender])

    def _is_spare(self, receipt: Receipt, held: Held) -> bool:
        """Whether a receipt may be one in another ballot of the round, where fewer are eligible: others may be in it
        already. Raises RemoteProtocolError if an ack is wrong."""
        terms, manifest = self._context.terms, held.manifest
        if manifest is None or held.receipt is not None or len(terms.all_voters) < 2:
            return False
        for mark in receipt.acks:
            check_mark(mark, held.signed.peer, receipt.manifest, manifest, self._context.verifier)
        return Tally(terms, manifest, receipt.acks).is_everywhere

    def add_late_receipt(self, receipt: Receipt, sender: PeerId) -> None:
        """A receipt of an older round, if it still is one: its ackers may have left since."""
        held = self.by_hash.get(receipt.manifest)
        if held is None or held.manifest is None or self._stands(receipt, held.signed.peer, held.manifest):
            self.add_receipt_or_keep(receipt, sender)

    def carry(self, old: Held) -> None:
        """Take over a statement of the previous round with what is known about it.

        Raises RemoteProtocolError if it is no longer valid. A receipt whose ackers are no longer eligible is dropped.
        """
        context, manifest = self._context, old.manifest
        self._check(old.signed, old.hash)
        held = Held(signed=old.signed, hash=old.hash, held_at_ms=context.now_ms)
        held.refused_by = old.refused_by
        if manifest is not None:
            held.checks, held.asked, held.acked = old.checks, old.asked, old.acked
            held.acks = {peer: ack for peer, ack in old.acks.items() if peer in context.terms.eligible_set}
            context.held.update(manifest.pieces[i].blob for i, reason in old.checks.items() if reason is None)
            if old.signed.peer == context.me:
                context.held.update(piece.blob for piece in manifest.pieces)
                promises = context.updates_on(manifest.prev)
                promises.persist(f"signed/manifest/{manifest.round}", encode(old.signed))
            if old.receipt is not None and self._stands(old.receipt, old.signed.peer, manifest):
                held.take_receipt(old.receipt, receipt_hash(old.receipt), context.now_ms)
                self.receipts[held.receipt_hash] = old.receipt
        self._insert(held)

    def _stands(self, receipt: Receipt, author: PeerId, manifest: Manifest) -> bool:
        """Whether a receipt of an earlier round is one in this round too."""
        context = self._context
        try:
            context.derive.check_receipt(context.terms, receipt, author, manifest, context.verifier)
        except RemoteProtocolError:
            return False  # it was valid: its ackers have left, or more are needed now
        return True

    def add_other_receipt(self, receipt: Receipt) -> None:
        """A receipt that another ballot of this round knew, if it still is one: a cut may name it."""
        held = self.by_hash.get(receipt.manifest)
        if held is not None and held.manifest is not None:
            identity = receipt_hash(receipt)
            if identity not in self.receipts and self._stands(receipt, held.signed.peer, held.manifest):
                self.receipts[identity] = receipt
                if held.receipt is None:
                    held.take_receipt(receipt, identity, self._context.now_ms)

    def add_receipt(self, receipt: Receipt) -> bool:
        """A receipt of an update that is held. Raises RemoteProtocolError. Returns whether it is new."""
        held = self.by_hash.get(receipt.manifest)
        identity = receipt_hash(receipt)
        if held is None or held.manifest is None or identity in self.receipts:
            return False
        context = self._context
        ref = Ref(RefKind.RECEIPT, identity, receipt.manifest)
        if held.receipt is not None and not context.is_wanted(ref):
            return False  # one is enough, unless a cut names this one
        context.derive.check_receipt(context.terms, receipt, held.signed.peer, held.manifest, context.verifier)
        self.receipts[identity] = receipt
        context.found(ref)
        if held.receipt is None:
            held.take_receipt(receipt, identity, context.now_ms)
            held.acks.update({mark.peer: mark for mark in receipt.acks})
        return True

    # --- for the rest of the machine ---------------------------------------------------------------------------------

    def refs(self) -> list[tuple[Ref, PeerId, int]]:
        """(ref, author, held since) of all statements and receipts that are held."""
        found = []
        for held in self.slots.values():
            found.append((Ref(RefKind.STATEMENT, held.hash, NO_DIGEST), held.signed.peer, held.held_at_ms))
            if held.receipt is not None:
                ref = Ref(RefKind.RECEIPT, held.receipt_hash, held.hash)
                found.append((ref, held.signed.peer, held.receipt_held_at_ms))
        return found

    def lacks(self, ref: Ref) -> bool:
        """Whether an offered statement or receipt is news."""
        if ref.kind is RefKind.STATEMENT:
            return ref.hash not in self.by_hash
        if ref.kind is RefKind.RECEIPT:
            held = self.by_hash.get(ref.about)
            return held is None or held.receipt is None
        return False

    def sources(self, blob: Digest) -> tuple[PeerId, ...]:
        """Who may have a piece: its author, then those who acknowledged the update."""
        held = self._holders.get(blob)
        return () if held is None else (held.signed.peer, *sorted(held.acks))

    def tick(self) -> None:
        """Reach further for pieces of updates that have no receipt yet."""
        if self._due_ms is not None and self._context.now_ms >= self._due_ms:
            self._reach()

    def _reach(self) -> None:
        self._due_ms = None
        for held in list(self.slots.values()):
            if held.manifest is not None and held.receipt is None and held.signed.peer != self._context.me:
                self._ask_pieces(held)
                self._note_due(held)

    def _note_due(self, held: Held) -> None:
        """Look at an update again when the next resend has passed since it came."""
        if held.manifest is None or held.receipt is not None or len(held.asked) == len(held.manifest.pieces):
            return
        resend_ms = self._context.terms.config.protocol.resend_ms
        due = held.held_at_ms + ((self._context.now_ms - held.held_at_ms) // resend_ms + 1) * resend_ms
        self._due_ms = due if self._due_ms is None else min(self._due_ms, due)

    def deadline_ms(self) -> int | None:
        """When the next piece comes within reach."""
        return self._due_ms
