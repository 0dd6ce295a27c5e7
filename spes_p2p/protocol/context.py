"""What the parts of the round machine share: time, identity, the terms of the round, and the way out.

`sign_once` keeps promises: a slot is signed once, journalled in the same batch of effects, and after a restart the
journalled bytes are sent again instead of new ones. Entries are kept for a height. What may be promised once on a tip
is under the round and its tip, what may be promised once in a ballot under the ballot, which for the final voting lasts
over all tentative rounds of the height; an update, and which one of a peer was acknowledged, is under the certificate
that it builds on. What was acknowledged is taken over into the next heights while a certificate may name the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spes_p2p.errors import LocalProtocolError
from spes_p2p.ids import Digest, PeerId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol.codec import decode_signed, encode, sign
from spes_p2p.protocol.derive import Derive
from spes_p2p.protocol.effects import Effect, Notify, Persist
from spes_p2p.protocol.head import Terms
from spes_p2p.protocol.messages import CutAnnouncement, Proposal, Ref, Signed, SignedBody, ViewChange, Vote, Want
from spes_p2p.protocol.outbox import Outbox
from spes_p2p.protocol.wire import Wire

_ACKED = "acked/"


@dataclass(slots=True)
class _Wanted:
    sources: list[PeerId]
    next_source: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class Promises:
    """The journal under one prefix."""

    context: Context
    prefix: str

    def entries(self) -> dict[str, bytes]:
        """What was journalled, by slot, sorted."""
        journal = self.context.journal
        return {key.removeprefix(self.prefix): journal[key] for key in sorted(journal) if key.startswith(self.prefix)}

    def get(self, slot: str) -> bytes | None:
        """One entry."""
        return self.context.journal.get(self.prefix + slot)

    def persist(self, slot: str, data: bytes) -> None:
        """Journal an entry."""
        key = self.prefix + slot
        if self.context.journal.get(key) != data:
            self.context.journal[key] = data
            self.context.emit(Persist(entries={key: data}))

    def promised(self, slot: str) -> Signed | None:
        """What was signed for a slot, before a restart or after it."""
        data = self.get(f"signed/{slot}")
        return None if data is None else decode_signed(data)

    def sign_once(self, slot: str, body: SignedBody) -> Signed:
        """Sign for a slot, or return what was signed for it before."""
        before = self.promised(slot)
        if before is not None:
            return before
        signed = sign(self.context.signer, body)
        self.persist(f"signed/{slot}", encode(signed))
        return signed


def height_prefix(terms: Terms) -> str:
    """Of all journal entries of a height."""
    return f"{terms.head.epoch:06d}/{terms.height:010d}/"


def base_prefix(terms: Terms, base: Digest) -> str:
    """Of the journal entries of a height about updates that build on a certificate."""
    return f"{height_prefix(terms)}on-{base.hex()[:16]}/"


def acked_slot(author: PeerId) -> str:
    """Where the update of a peer that was acknowledged stands among those on the same certificate."""
    return f"{_ACKED}{author.hex()}"


def still_acked(journal: Mapping[str, bytes], old: Terms, new: Terms) -> dict[str, bytes]:
    """Journal entries of the next height: what was acknowledged for slots that a certificate may still name."""
    served = {acked_slot(row.peer): row.base_round for row in new.head.state.roster}
    found = {}
    for number, base in new.head.recent:
        before, after = base_prefix(old, base), base_prefix(new, base)
        for key, entry in journal.items():
            slot = key.removeprefix(before)
            if slot != key and slot.startswith(_ACKED) and served.get(slot, 0) <= number:  # who is out may come back
                found[after + slot] = entry
    return found


@dataclass(slots=True)
class Context:
    """One round's shared surroundings. `now_ms` is set before every input."""

    terms: Terms
    signer: Signer
    verifier: Verifier
    outbox: Outbox
    private_seed: bytes
    now_ms: int
    opened_at_ms: int
    derive: Derive = field(default_factory=Derive)
    journal: dict[str, bytes] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    held: set[Digest] = field(default_factory=set)
    """Blobs that became held in this round; those of the previous state are held once `state_ready`."""
    state_ready: bool = False
    _wants: dict[Ref, _Wanted] = field(default_factory=dict)

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self.signer.peer_id

    @property
    def is_voter(self) -> bool:
        """Whether this peer votes in this round."""
        return self.me in self.terms.voter_set

    @property
    def is_member(self) -> bool:
        """Whether this peer is in the roster."""
        return self.me in self.terms.member_set

    @property
    def height_key(self) -> str:
        """Prefix of all journal entries of the height."""
        return height_prefix(self.terms)

    @property
    def key(self) -> str:
        """Prefix of the journal entries of this round on this tip."""
        return f"{self.height_key}{self.terms.round:010d}-{self.terms.head.hash.hex()[:16]}/"

    @property
    def ballot(self) -> Promises:
        """Promises of the ballot: of the height, or of this tentative attempt."""
        attempt = self.terms.branch.hex()[:16]
        return Promises(self, f"{self.key}side-{attempt}/" if attempt else f"{self.height_key}ballot/")

    @property
    def kept(self) -> Promises:
        """What bodies that this voter has prevoted on this tip are made of."""
        return Promises(self, f"{self.key}kept/")

    def updates_on(self, base: Digest) -> Promises:
        """Promises about the update that builds on a certificate."""
        return Promises(self, base_prefix(self.terms, base))

    def in_ballot(self, body: CutAnnouncement | Proposal | Vote | ViewChange) -> bool:
        """Whether a message belongs to the ballot that is open here."""
        terms = self.terms
        expected = (terms.head.run.run_id, terms.head.epoch, terms.ballot_round, terms.branch)
        return (body.run, body.epoch, body.round, body.branch) == expected

    def emit(self, effect: Effect) -> None:
        """Give the shell something to do."""
        self.effects.append(effect)

    def notify(self, text: str, level: str = "info") -> None:
        """Tell a person."""
        self.emit(Notify(level=level, text=text))

    def promised(self, slot: str) -> Signed | None:
        """What was signed for a slot of this round on this tip, before a restart or after it."""
        return Promises(self, self.key).promised(slot)

    def sign_once(self, slot: str, body: SignedBody) -> Signed:
        """Sign for a slot of this round on this tip, or return what was signed for it before."""
        return Promises(self, self.key).sign_once(slot, body)

    def send(self, peers: Iterable[PeerId], message: Wire) -> None:
        """Send to all of them but this peer, repeated until confirmed."""
        self.send_bytes(peers, encode(message))

    def send_bytes(self, peers: Iterable[PeerId], data: bytes) -> None:
        """Like `send`, for a message that is encoded already."""
        for peer in peers:
            if peer != self.me:
                send = self.outbox.add(peer, data, round_number=self.terms.round, now_ms=self.now_ms)
                if send is not None:
                    self.emit(send)

    def send_once(self, peers: Iterable[PeerId], message: Wire) -> None:
        """Send to all of them but this peer, not repeated: the next one says more."""
        data = encode(message)
        for peer in peers:
            if peer != self.me:
                self.emit(self.outbox.once(peer, data))

    def want(self, ref: Ref, sources: Iterable[PeerId]) -> None:
        """Ask for an object until `found`: one source at a time, the next after each `resend`.

        What is asked for is named by something signed, or counted where it came from: the number is bounded.
        """
        wanted = self._wants.setdefault(ref, _Wanted([], 0, self.now_ms))
        for source in sources:
            if source != self.me and source not in wanted.sources:
                wanted.sources.append(source)
        self._ask(ref, wanted)

    def is_wanted(self, ref: Ref) -> bool:
        """Whether an object was asked for and has not come."""
        return ref in self._wants

    def found(self, ref: Ref) -> None:
        """An object is here."""
        self._wants.pop(ref, None)

    def tick(self) -> None:
        """Repeat requests that are due."""
        for ref, wanted in self._wants.items():
            self._ask(ref, wanted)

    def deadline_ms(self) -> int | None:
        """When the next request is due."""
        return min((wanted.due_ms for wanted in self._wants.values() if wanted.sources), default=None)

    def _ask(self, ref: Ref, wanted: _Wanted) -> None:
        if not wanted.sources or wanted.due_ms > self.now_ms:
            return
        source = wanted.sources[wanted.next_source % len(wanted.sources)]
        wanted.next_source += 1
        wanted.due_ms = self.now_ms + self.terms.config.protocol.resend_ms
        # A repeated request must leave again, so it is not deduplicated: it carries no promise and is not re-sent.
        ask = Want(self.terms.head.epoch, self.terms.round, (ref,))
        send = self.outbox.once(source, encode(ask))
        self.emit(send)

    def restore(self, journal: Mapping[str, bytes]) -> None:
        """Take over the journal entries of this height, after a restart or from its earlier rounds."""
        if self.journal:
            raise LocalProtocolError("the journal is restored before anything is signed")
        self.journal.update({key: data for key, data in journal.items() if key.startswith(self.height_key)})
